// Streams a text, resuming it after lost connections, and cancels another stream: main [PROMPT]
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <random>
#include <sstream>
#include <thread>

#include <grpcpp/grpcpp.h>

#include "pagewire/v1/inference_service.grpc.pb.h"

namespace pb = pagewire::v1;
using Clock = std::chrono::steady_clock;

static std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

static bool can_resume(const grpc::Status& status, bool again) {
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::CANCELLED:
      return true;
    case grpc::StatusCode::INTERNAL:
      return status.error_message().find("RST_STREAM") != std::string::npos;
    case grpc::StatusCode::ALREADY_EXISTS:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return again;
    default:
      return false;
  }
}

// Calls `use` with each message until it returns false, which cancels the call. Resumes the stream after a loss.
static grpc::Status generate(pb::InferenceService::Stub& client, pb::GenerateRequest request,
                             const std::function<bool(const pb::GenerateResponse&)>& use) {
  pb::ResumeState state;
  auto heard = Clock::now();
  while (true) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(10));
    context.AddMetadata("authorization", "Bearer " + variable("PAGEWIRE_CLIENT_API_KEY"));
    auto stream = client.Generate(&context, request);
    pb::GenerateResponse message;
    bool is_finished = false, is_wanted = true;
    while (stream->Read(&message)) {
      heard = Clock::now();
      if (!state.outputs_size()) {
        state.set_seed(message.seed());
        state.set_model_fingerprint(message.model_fingerprint());
        state.add_outputs();
      }
      state.mutable_outputs(0)->mutable_token_ids()->MergeFrom(message.token_ids());
      is_finished |= message.finish_reason() != pb::FINISH_REASON_UNSPECIFIED;
      if (is_wanted && !use(message)) {
        is_wanted = false;
        context.TryCancel();
      }
    }
    grpc::Status status = stream->Finish();
    if (is_finished) return grpc::Status::OK;
    if (!is_wanted || !can_resume(status, request.has_resume()) || Clock::now() - heard > std::chrono::minutes(1))
      return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    *request.mutable_resume() = state;
    std::cerr << "trying again" << std::endl;
  }
}

static pb::GenerateRequest new_request(int count, char** words) {
  pb::GenerateRequest request;
  std::random_device random;
  request.set_request_id(std::to_string(random()) + "-" + std::to_string(random()));
  request.set_text(count > 1 ? words[1] : "Once upon a time");
  request.mutable_sampling()->set_max_tokens(256);
  request.mutable_sampling()->set_temperature(1);
  return request;
}

int main(int count, char** words) {
  std::ifstream file(variable("PAGEWIRE_CLIENT_TLS") + "/ca.crt");
  std::stringstream authority;
  authority << file.rdbuf();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = authority.str();
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  auto channel =
      grpc::CreateCustomChannel(variable("PAGEWIRE_TARGET"), grpc::SslCredentials(options), arguments);
  auto client = pb::InferenceService::NewStub(channel);

  uint64_t seed = 0;
  grpc::Status status = generate(*client, new_request(count, words), [&](const pb::GenerateResponse& message) {
    if (message.has_seed()) seed = message.seed();
    std::cout << message.text() << std::flush;
    return true;
  });
  if (!status.ok()) {
    std::cerr << status.error_code() << ": " << status.error_message() << std::endl;
    return 1;
  }
  std::cout << "\nseed " << seed << std::endl;

  status = generate(*client, new_request(count, words), [](const pb::GenerateResponse&) { return false; });
  if (status.error_code() == grpc::StatusCode::CANCELLED) std::cout << "cancelled" << std::endl;
}
