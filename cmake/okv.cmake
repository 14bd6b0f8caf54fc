# okv_compile_options(FLAGS...): flags of the host compiler, for every target.
function(okv_compile_options)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${ARGN}>")
endfunction()

# okv_library(NAME SOURCES a.cc b.cc DEPS x y): one static library a folder.
function(okv_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} Threads::Threads)
endfunction()

# okv_program(okv-name SOURCES main.cc DEPS x): a program in bin/.
function(okv_program name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
endfunction()

# okv_test(name_test SOURCES a_test.cc DEPS x [PROGRAMS okv-node] [THREADED] [LONG] [TIMEOUT s]):
# one test program a folder, one CTest entry a test. PROGRAMS are what it starts: they are built
# first. THREADED ones are what the TSan build runs (CTest label "...-threaded"). LONG ones (label
# "...-long") run only with `tests/run.sh --long`.
function(okv_test name)
  cmake_parse_arguments(ARG "THREADED;LONG" "TIMEOUT" "SOURCES;DEPS;PROGRAMS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock GTest::gtest GTest::gtest_main)
  if(ARG_PROGRAMS)
    add_dependencies(${name} ${ARG_PROGRAMS})
  endif()
  if(OKV_TEST_LAUNCHER)
    set_property(TARGET ${name} PROPERTY CROSSCOMPILING_EMULATOR "${OKV_TEST_LAUNCHER}")
  endif()
  # One value a property: gtest_discover_tests cannot pass on a list. Labels are matched as regular
  # expressions, so "threaded-long" is both; the second variable takes the other property.
  set(labels ${name})
  if(ARG_THREADED)
    string(APPEND labels "-threaded")
    set_property(GLOBAL APPEND PROPERTY OKV_THREADED_TESTS ${name})
  endif()
  if(ARG_LONG)
    string(APPEND labels "-long")
  endif()
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS ${labels} TIMEOUT ${ARG_TIMEOUT}
    ENVIRONMENT "OKV_SOURCE_DIR=${CMAKE_SOURCE_DIR}"
    ENVIRONMENT_MODIFICATION "OKV_BIN_DIR=set:${CMAKE_RUNTIME_OUTPUT_DIRECTORY}")
endfunction()

# okv_aggregate_targets(): okv_threaded_tests builds every THREADED test; okv_tsa runs clang's
# thread-safety analysis over all libraries and programs. Call it when every folder was added.
function(okv_aggregate_targets)
  get_property(threaded GLOBAL PROPERTY OKV_THREADED_TESTS)
  add_custom_target(okv_threaded_tests)
  if(threaded)
    add_dependencies(okv_threaded_tests ${threaded})
  endif()
  if(TARGET okv_messages)
    # The generated headers, not the library: the analysis needs no object file.
    get_target_property(generated okv_messages SOURCES)
    list(FILTER generated INCLUDE REGEX "[.]pb[.]cc$")
  endif()
  add_custom_target(okv_tsa
    COMMAND python3 ${CMAKE_SOURCE_DIR}/tests/tsa.py ${CMAKE_BINARY_DIR}
    DEPENDS ${generated} USES_TERMINAL)
endfunction()

# okv_find_test_launcher(): gcc 12's ThreadSanitizer cannot map its shadow memory where the kernel
# randomizes more than 28 bits of addresses (Ubuntu 24.04: 32): tests then start without.
function(okv_find_test_launcher)
  if(NOT OKV_SANITIZE MATCHES "thread" OR NOT EXISTS /proc/sys/vm/mmap_rnd_bits)
    return()
  endif()
  file(READ /proc/sys/vm/mmap_rnd_bits bits)
  find_program(SETARCH_PROGRAM setarch)
  if(bits GREATER 28 AND SETARCH_PROGRAM)
    execute_process(COMMAND ${SETARCH_PROGRAM} -R true RESULT_VARIABLE result ERROR_QUIET)
    if(result EQUAL 0)
      set(OKV_TEST_LAUNCHER ${SETARCH_PROGRAM} -R PARENT_SCOPE)
    else()
      message(WARNING "OscarKV: TSan tests may not start: vm.mmap_rnd_bits is over 28 and "
              "setarch -R is not permitted here")
    endif()
  endif()
endfunction()

# okv_find_cuda(): enables CUDA when OKV_CUDA allows it and the toolkit is there, 12.8 or later: an
# older one does not know sm_100, and CMake's own check of it would end the configuration.
macro(okv_find_cuda)
  set(OKV_HAVE_CUDA OFF)
  if(NOT OKV_CUDA STREQUAL "OFF")
    include(CheckLanguage)
    find_program(OKV_NVCC nvcc HINTS /usr/local/cuda/bin)
    if(OKV_NVCC AND NOT CMAKE_CUDA_COMPILER)
      execute_process(COMMAND ${OKV_NVCC} --version OUTPUT_VARIABLE okv_nvcc_version)
      string(REGEX REPLACE ".*release ([0-9.]+),.*" "\\1" okv_nvcc_version "${okv_nvcc_version}")
      if(okv_nvcc_version VERSION_GREATER_EQUAL 12.8)
        set(CMAKE_CUDA_COMPILER ${OKV_NVCC})
      else()
        message(STATUS "OscarKV: ${OKV_NVCC} is ${okv_nvcc_version}; the GPU parts need 12.8")
        set(CMAKE_CUDA_COMPILER NOTFOUND)
      endif()
    endif()
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80 90a 100)
    endif()
    if(CMAKE_CUDA_COMPILER)
      check_language(CUDA)
    endif()
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      # CMake 3.25 does not know that nvcc has C++20.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
      find_package(CUDAToolkit REQUIRED)
      set(OKV_HAVE_CUDA ON)
    elseif(OKV_CUDA STREQUAL "ON")
      message(FATAL_ERROR "OKV_CUDA=ON, but no CUDA compiler (nvcc 12.8 or later) was found")
    endif()
  endif()
  if(OKV_HAVE_CUDA)
    message(STATUS "OscarKV: CUDA ON, ${CUDAToolkit_VERSION}")
  else()
    message(STATUS "OscarKV: CUDA OFF (OKV_CUDA=${OKV_CUDA})")
  endif()
endmacro()
