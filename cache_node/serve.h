#ifndef OKV_CACHE_NODE_SERVE_H_
#define OKV_CACHE_NODE_SERVE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "cache_node/assembly.h"
#include "cache_node/block_table.h"
#include "cache_node/formats.h"
#include "cache_node/hbm_mover.h"
#include "cache_node/node_metrics.h"
#include "cache_node/recheck.h"
#include "cache_node/spill.h"
#include "cache_node/staging_pool.h"
#include "cache_node/turn_queue.h"
#include "cache_node/work_queue.h"
#include "client/transport/transport.h"
#include "proto/block_range.h"
#include "proto/clock.h"
#include "proto/data_plane.h"
#include "proto/data_plane.pb.h"
#include "proto/mutex.h"
#include "proto/page_layout.h"

namespace okv {

struct DataPlaneOptions {
  size_t sessions_max = 1024;
  // Objects asked for and not yet on their way, a session.
  size_t objects_queued_max = size_t{4} * kObjectsPerFetchMax;
  // Transfers to readers at once: enough to keep a link busy, few enough that the pins of one slow
  // reader, and the buffers of disk reads that DRAM has no room for, stay a small part of the
  // arena. A session with none under way may always start one: readers that stopped reading cannot
  // together keep another from its objects. At most bulks_max + sessions_max in all.
  uint32_t bulks_per_session_max = 32;
  uint32_t bulks_max = 128;
  // What lies side by side in HBM and at the reader leaves as one transfer, up to so many objects
  // (1: never) and bytes: between GPUs of one host a transfer of 1.27 MiB takes less than a
  // microsecond, and each has three messages over TCP.
  uint32_t merged_objects_max = kObjectsPerDeliveryMax;
  uint64_t merged_bytes_max = uint64_t{128} << 20;
  // From so many on they leave without what lies apart from them, which needs a copy.
  uint32_t merged_objects_min = 8;
  // Puts offered and not yet answered, a session.
  size_t puts_per_session_max = 4096;
  uint32_t disk_threads = 2;
  // Copy the heads of tensor-parallel ranks together: one runs as fast as a core copies.
  uint32_t copy_threads = 2;
  uint64_t staging_kept_bytes_max = uint64_t{64} << 20;

  int64_t hello_nanos_max = 10'000'000'000;  // A connection that says nothing is closed.
  int64_t fetch_nanos_max = 60'000'000'000;  // Also for a request without a deadline.
  int64_t put_nanos_max = 60'000'000'000;
  // From a block's first share to its last. As long as the control plane's reservations live: when
  // they have ended, another group may write the block.
  int64_t assembly_nanos_max = 30'000'000'000;
  // A transfer still running this long after its deadline ends with its session: nothing else frees
  // what it pins.
  int64_t stall_nanos = 5'000'000'000;

  RecheckerOptions recheck = {};

  // kInvalidArgument naming the field.
  absl::Status Validate() const;
};

// Answers workers. A session is a connection: Hello first, with a ticket and a format; then
// fetches, which send objects straight from the arena, and puts, which receive straight into it.
// What a peer sends is checked before it is used, and nothing is allocated by a length it claims.
// Everything private is owned by the transport's thread. Disk reads and the copies that
// ranges need run on a few threads beside it.
class DataPlane final : public Transport::AcceptHandler {
 public:
  struct Parts {
    Transport* transport;
    BlockTable* table;
    Spiller* spiller;
    Tier* disk;
    Formats* formats;
    NodeMetrics* metrics;
    const Clock* clock;
    HbmMover* hbm = nullptr;  // Null: no HBM tier.
    uint64_t arena_bytes;     // A block larger than this can never come in.
    std::string node_id;
    std::function<std::string()> ticket_key;  // Empty: nobody can be let in yet.
    std::function<bool()> draining;           // Then puts are refused. Any thread.
    std::function<void(ObjectRef object)> on_committed;
    // A reader's complaint was true, and the object is gone. Any thread.
    std::function<void(const ObjectId& id, const absl::Status& why)> on_removed;
    std::function<void(const std::string& line)> log;
  };
  // REQUIRES: options.Validate() is OK. The parts outlive it, but for the transport, which must be
  // gone before it.
  DataPlane(const DataPlaneOptions& options, Parts parts);
  ~DataPlane() override;

  // Errors are Transport::Listen's. Once.
  absl::StatusOr<std::string> Listen(const std::string& address);
  // Ends disk reads and the clock's ticks; sessions end with EndSessions or the transport.
  void StopThreads() ABSL_LOCKS_EXCLUDED(mu_);
  // Closes the sessions, and from now on every new one, and waits until none is left: then nothing
  // is put or read any more. False when that takes longer than the transport's patience with a
  // peer. Any thread but the transport's, while the transport runs.
  bool EndSessions() ABSL_LOCKS_EXCLUDED(mu_);

  // Any thread.
  uint64_t sessions_count() const { return sessions_count_.load(); }
  // Somebody found an object of this node damaged: its copies are verified. Any thread.
  void Recheck(const std::string& tenant, const ObjectId& id) { rechecker_.Complain(tenant, id); }

  void OnAccept(Connection* connection) override;
  void OnMessage(Connection* connection, MessageType type, absl::string_view message) override;
  void OnBulk(Connection* connection, MessageType type, absl::string_view header,
              std::unique_ptr<BulkReceive> payload) override;
  void OnClosed(Connection* connection, const absl::Status& why) override;

  // What time does: expires requests, closes who is silent or stalled. Transport thread; the ticker
  // calls it every kTickMillis.
  void Tick();
  static constexpr int kTickMillis = 20;

 private:
  // One object that a reader asked for.
  struct Delivery {
    uint64_t request_id;
    uint32_t ordinal;
    ObjectId id;
    BlockIndex index;
    BlockRange range;
    bool follows = false;         // At the reader it lies behind the object before it.
    uint64_t pack_bytes_max = 0;  // Of the request.
    int64_t received_nanos;
    int64_t deadline_nanos;
    ObjectPin pin;               // From its turn on.
    AlignedBuffer own;           // The payload, when DRAM has no room for it.
    StagingPool::Buffer staged;  // The range, when the payload has it in several pieces.
    DeviceStaging::Slot packed;  // All that leaves together, where it lies apart in HBM.
    absl::Status loaded;         // How the disk read or the copy ended.
    absl::string_view tier = "dram";
    bool sending = false;
    std::vector<std::shared_ptr<Delivery>> more;  // What goes with it, in order.
  };
  // Shared with a disk read, which outlives a session that closes.
  using DeliveryRef = std::shared_ptr<Delivery>;

  // A share of an object, or the whole, that a writer offers.
  struct Incoming {
    uint64_t request_id;
    int64_t received_nanos;
    Share share;
    AssemblyRef assembly;
    std::unique_ptr<BulkReceive> payload;
    StagingPool::Buffer staged;  // The share, when the block has it in several pieces.
    absl::Status stored;         // How the transfer or, after it, the verification ended.
  };
  // Shared with the copy into the block, which outlives a session that closes.
  using IncomingRef = std::shared_ptr<Incoming>;

  struct Session {
    enum class State { kNew, kOpen, kRefused, kClosing };
    uint64_t id;
    Connection* connection;
    State state = State::kNew;
    int64_t since_nanos;  // Of the state.
    std::string client_name;
    std::string tenant;
    const Format* format = nullptr;
    FormatId format_id;
    PageLayout layout;
    std::string device_path;  // Of the connection, known from the first delivery from HBM on.
    std::deque<DeliveryRef> queue;
    int64_t queue_deadline_nanos = 0;  // No deadline in the queue is earlier.
    bool has_turn = false;             // It is in turns_.
    uint32_t slots_count = 0;          // Places of the staging that it has.
    bool waits_for_slot = false;       // For one of them, until one of its transfers ends.
    absl::flat_hash_map<uint64_t, DeliveryRef> sending;  // By serial number.
    absl::flat_hash_map<uint64_t, IncomingRef> incoming;
    uint32_t shares_waiting = 0;  // Received; their blocks lack others.
  };

  // Null for a connection that is being closed.
  Session* Find(Connection* connection);
  Session* FindById(uint64_t session_id);
  void Close(Session* session, absl::string_view why);
  void Erase(uint64_t session_id);
  void NoteIfAllEnded() ABSL_LOCKS_EXCLUDED(mu_);

  void OnHello(Session* session, absl::string_view message);
  absl::Status OpenSession(Session* session, const v1::Hello& hello);

  void OnFetchRequest(Session* session, absl::string_view message);
  void OnComplaint(Session* session, absl::string_view message);
  // The range of each object, once everything else the request says was checked.
  absl::StatusOr<BlockRange> CheckFetch(const Session& session,
                                        const v1::FetchRequest& request) const;
  // Gives free places to sessions that have something to send, in turn.
  void Pump();
  void TakeTurn(Session* session);
  void Start(Session* session, DeliveryRef delivery);
  absl::Status PinFor(const Session& session, Delivery* delivery);
  // Of `first`, whose payload is in HBM, and what can leave together with it.
  void StartFromHbm(Session* session, uint64_t serial, const DeliveryRef& first);
  // Takes from the queue what can leave together with `first`: what lies behind it in HBM and at
  // the reader, and what lies elsewhere if a place to put it together is free. False: the session
  // had better wait for one of its places.
  bool JoinOthers(Session* session, Delivery* first);
  // Whether `bytes` that leave with `first` can lie side by side in a place of the staging, which
  // it gets. Sessions share the places, and leave one's share to who comes next. *busy: only
  // because this one has its share under way.
  bool TakeSlot(Session* session, uint64_t bytes, Delivery* first, bool* busy);
  // Null: the session is gone.
  void GiveSlot(Session* session, Delivery* first);
  uint64_t BytesOf(const Session& session, const Delivery& delivery) const {
    return delivery.range.bytes(session.layout, delivery.id.codec);
  }
  // The header of a delivery, empty when it does not fit: then the delivery has failed.
  std::string DeliveryHeader(Session* session, uint64_t serial, const Delivery& delivery);
  // Gather() on a thread that may block, then Loaded().
  void GatherAside(uint64_t session_id, uint64_t serial, DeliveryRef delivery);
  // Gives idle disk threads to sessions that wait for one, in turn.
  void PumpDisk();
  void ReadFromDisk(uint64_t session_id, uint64_t serial, DeliveryRef delivery);
  // Gives up the session's reads that have not begun.
  void DropReads(Session* session);
  // Copies the range together when the payload has it in several pieces. Any thread; not the
  // transport's when the payload is in HBM.
  void Gather(Delivery* delivery);
  // Where the whole payload is. REQUIRES: it was loaded.
  static Payload PayloadOf(const Delivery& delivery);
  void Loaded(uint64_t session_id, uint64_t serial, DeliveryRef delivery);
  void SendDelivery(Session* session, uint64_t serial, Delivery* delivery);
  void OnSent(Session* session, uint64_t serial, const absl::Status& status);
  // A delivery arrived, with all that goes with it: counted, also what it means for the HBM tier.
  void NoteHits(Session* session, const Delivery& first);
  // One object's delivery failed.
  void NoteFailed(Session* session, const Delivery& delivery, const absl::Status& status);
  void SendFailure(Session* session, uint64_t request_id, uint32_t ordinal,
                   const absl::Status& status);

  void OnPutOffer(Session* session, absl::string_view header, std::unique_ptr<BulkReceive> payload);
  // What is offered, once everything the offer says was checked.
  absl::StatusOr<Share> CheckOffer(const Session& session, const v1::PutOffer& offer,
                                   size_t payload_bytes) const;
  void FindRoom(const AssemblyRef& assembly);
  void OnRoom(const AssemblyRef& assembly, absl::StatusOr<Extent> extent);
  void ReceiveShare(uint64_t session_id, uint64_t serial, Incoming* incoming);
  void OnReceived(uint64_t session_id, uint64_t serial, const absl::Status& status);
  // Verifies the share where it is stored. Any thread.
  void Store(Incoming* incoming) const;
  // Without its session a share that is whole counts all the same.
  void OnStored(uint64_t session_id, const IncomingRef& incoming);
  // Frees the places of what a session that ends has not brought.
  void WithdrawAll(Session* session);
  void AnswerPut(Session* session, uint64_t request_id, const absl::Status& status);
  // The share is here; the answer follows with the last one of its block.
  void WaitForOthers(Session* session, uint64_t request_id, Assembly* assembly);
  void AnswerWaiting(Assembly* assembly, const absl::Status& status);

  void RunTicker() ABSL_LOCKS_EXCLUDED(mu_);
  void ExpireQueue(Session* session, int64_t now_nanos);
  // Why the session should be closed by now; empty: it should not.
  std::string Overdue(const Session& session, int64_t now_nanos) const;

  const DataPlaneOptions options_;
  const Parts parts_;
  std::atomic<uint64_t> sessions_count_{0};
  std::atomic<bool> tick_posted_{false};

  // ---- Transport thread.
  bool ending_ = false;  // EndSessions was called.
  absl::flat_hash_map<uint64_t, std::unique_ptr<Session>> sessions_;
  absl::flat_hash_map<Connection*, uint64_t> by_connection_;
  std::deque<uint64_t> turns_;  // Session ids.
  uint32_t bulks_count_ = 0;    // Places taken, disk reads included.
  TurnQueue<uint64_t> reads_;   // Serial numbers of deliveries that wait for a disk thread.
  uint32_t reads_running_ = 0;  // Disk threads in use.
  uint32_t slot_holders_ = 0;   // Sessions that have places of the staging.
  uint64_t next_session_id_ = 1;
  uint64_t next_serial_ = 1;

  Mutex mu_;
  CondVar stop_changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  CondVar sessions_ended_;
  bool all_ended_ ABSL_GUARDED_BY(mu_) = false;

  StagingPool staging_;
  Assemblies assemblies_;  // Transport thread.
  WorkQueue disk_;
  WorkQueue copiers_;
  Rechecker rechecker_;
  std::thread ticker_;
};

}  // namespace okv

#endif  // OKV_CACHE_NODE_SERVE_H_
