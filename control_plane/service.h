#ifndef OKV_CONTROL_PLANE_SERVICE_H_
#define OKV_CONTROL_PLANE_SERVICE_H_

#include "control_plane/control.h"
#include "control_plane/control_metrics.h"
#include "proto/control.grpc.pb.h"

namespace okv {

// control.proto over Control: checks bounds, converts, maps statuses (absl codes are gRPC codes).
// Thread-safe. `control` and `metrics` outlive it.
class ControlService final : public v1::ControlPlane::Service {
 public:
  ControlService(Control* control, ControlMetrics* metrics)
      : control_(control), metrics_(metrics) {}

  grpc::Status OpenSession(grpc::ServerContext* context, const v1::OpenSessionRequest* request,
                           v1::OpenSessionResponse* response) override;
  grpc::Status Lookup(grpc::ServerContext* context, const v1::LookupRequest* request,
                      v1::LookupResponse* response) override;
  grpc::Status Reserve(grpc::ServerContext* context, const v1::ReserveRequest* request,
                       v1::ReserveResponse* response) override;
  grpc::Status PublishRotation(grpc::ServerContext* context,
                               grpc::ServerReader<v1::PublishRotationRequest>* reader,
                               v1::PublishRotationResponse* response) override;
  grpc::Status GetRotation(grpc::ServerContext* context, const v1::GetRotationRequest* request,
                           grpc::ServerWriter<v1::GetRotationResponse>* writer) override;
  grpc::Status ListRotations(grpc::ServerContext* context, const v1::ListRotationsRequest* request,
                             v1::ListRotationsResponse* response) override;
  grpc::Status RegisterNode(grpc::ServerContext* context, const v1::RegisterNodeRequest* request,
                            v1::RegisterNodeResponse* response) override;
  grpc::Status Heartbeat(grpc::ServerContext* context, const v1::HeartbeatRequest* request,
                         v1::HeartbeatResponse* response) override;
  grpc::Status ReportInventory(grpc::ServerContext* context,
                               grpc::ServerReader<v1::ReportInventoryRequest>* reader,
                               v1::ReportInventoryResponse* response) override;
  grpc::Status ReportCommits(grpc::ServerContext* context, const v1::ReportCommitsRequest* request,
                             v1::ReportCommitsResponse* response) override;
  grpc::Status DrainNode(grpc::ServerContext* context, const v1::DrainNodeRequest* request,
                         v1::DrainNodeResponse* response) override;
  grpc::Status GetClusterStatus(grpc::ServerContext* context,
                                const v1::GetClusterStatusRequest* request,
                                v1::GetClusterStatusResponse* response) override;

 private:
  Control* const control_;
  ControlMetrics* const metrics_;
};

}  // namespace okv

#endif  // OKV_CONTROL_PLANE_SERVICE_H_
