#ifndef OKV_CLIENT_OKV_H_
#define OKV_CLIENT_OKV_H_

// OscarKV for a decode worker: the one header to include, the library okv_client to link.
//
// In the order of a request's life:
//   1. CreateUcxTransport            once a process: the data plane's thread.
//   2. Cluster::GetRotation          the rotations of the model, checked against their hash.
//   3. Cluster::Connect              a session for one Format; every call carries its id.
//   4. Sequence::Create              the KV cache of one sequence in the worker's memory; with a
//                                    DriftMonitor, one for all, Stats() says how well the rotations
//                                    still fit.
//   5. ResumePrefix                  looks the prompt up and fetches what a resume point needs.
//   6. Sequence::Append              the tokens that are left, then each new token: the rotated,
//                                    quantized cache is attended to as it is.
//   7. StorePrompt, StoreFinished    puts the blocks where the next worker finds them.
//
// A worker that computes on a GPU has its pages there: OpenCudaDevice first; the device in
// UcxTransportOptions and in ClusterOptions; its page pool registered with the transport as
// MemoryKind::kDevice. FetchItem::buffer and PutItem::payload may then be addresses in the pool:
// payloads go between it and a node's HBM without passing through host memory where the machines
// have a way (Connection::device_path), and checksums are computed on the GPU. The paged kernels
// (kernels/cuda) attend to them where they are; Sequence is for workers that compute on the host.
//
// What a status code asks of the caller, everywhere:
//   kNotFound             a miss: go on without.
//   kAlreadyExists        somebody stored it before: as good as stored.
//   kUnavailable          a node or the control plane is gone: the call may be repeated.
//   kResourceExhausted    no room: back off.
//   kAborted              another writer is at it, or the write was pre-empted: leave it.
//   kDataLoss             the bytes arrived damaged from every node that has them: a miss.
//   kDeadlineExceeded     the time was up; nothing writes into the buffers any more.
//   kFailedPrecondition   a format, rotation set or version that does not match: the message names
//                         the field. Nothing was moved. Repeating does not help.
//   kInvalidArgument      the caller's bug.
// Cache errors never stop a sequence: a worker that cannot fetch computes.

#include "client/cluster.h"              // IWYU pragma: export
#include "client/device_memory.h"        // IWYU pragma: export
#include "client/drift.h"                // IWYU pragma: export
#include "client/prefix.h"               // IWYU pragma: export
#include "client/sequence.h"             // IWYU pragma: export
#include "client/transport/transport.h"  // IWYU pragma: export

#endif  // OKV_CLIENT_OKV_H_
