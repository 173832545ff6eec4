#include "kvtier/gds_engine.hpp"

#include <cerrno>
#include <utility>

#include "file_batch.hpp"
#include "gds_codes.hpp"
#include "gds_state.hpp"
#include "gds_streams.hpp"

namespace kvtier {
namespace {

std::shared_ptr<FileRunner> make_runner(const std::shared_ptr<gds::State>& state,
                                        std::uint32_t depth, GdsMode mode) {
  if (mode == GdsMode::kThreads) {
    return make_thread_runner(depth, [state](FileOperation operation, const FileSegment& segment) {
      return state->request(operation, segment);
    });
  }
  if (!state->no_cuda().empty()) throw GdsError(ENODEV, state->no_cuda());
  if (const std::string& missing = state->cufile().missing_for_streams; !missing.empty()) {
    throw GdsError(EOPNOTSUPP,
                   "no operations on streams: " + state->cufile().path + " has no " + missing);
  }
  return gds::make_stream_runner(state, depth);
}

}  // namespace

GdsEngine::GdsEngine(std::uint32_t depth, std::uint64_t segment_bytes,
                     const std::string& wheel_path, GdsMode mode) {
  if (depth < 1 || depth > FileEngine::kDepthMax) {
    throw std::invalid_argument("depth of " + std::to_string(depth) + ", between 1 and " +
                                std::to_string(FileEngine::kDepthMax));
  }
  state_ = std::make_shared<gds::State>(wheel_path, depth, segment_bytes);
  engine_ = std::make_unique<FileEngine>(segment_bytes, make_runner(state_, depth, mode));
  path_ = state_->cufile().path;
  no_cuda_ = state_->no_cuda();
}

GdsEngine::~GdsEngine() { close(); }

void GdsEngine::add_file(int fd) { open_state()->add_file(fd); }

void GdsEngine::remove_file(int fd) {
  if (const auto state = this->state()) state->remove_file(fd);
}

std::uint64_t GdsEngine::add_memory(std::uint64_t address, std::uint64_t nbytes,
                                    std::optional<int> device) {
  return open_state()->add_memory(address, nbytes, device);
}

void GdsEngine::remove_memory(std::uint64_t address, std::uint64_t number) {
  if (const auto state = this->state()) state->remove_memory(address, number);
}

void GdsEngine::read(std::span<const FileTransfer> items, std::span<std::int64_t> results,
                     StopFlag* stop) {
  engine_->read(items, results, stop);
}

void GdsEngine::write(std::span<const FileTransfer> items, std::span<std::int64_t> results,
                      StopFlag* stop) {
  engine_->write(items, results, stop);
}

void GdsEngine::close() {
  engine_->close();  // its threads and streams are gone after that, and their hold of the state
  std::shared_ptr<gds::State> last;
  const std::lock_guard lock(mutex_);
  last.swap(state_);
}

std::shared_ptr<gds::State> GdsEngine::state() {
  const std::lock_guard lock(mutex_);
  return state_;
}

std::shared_ptr<gds::State> GdsEngine::open_state() {
  std::shared_ptr<gds::State> state = this->state();
  if (!state) throw std::invalid_argument("the GDS engine is closed");
  return state;
}

int GdsEngine::error_number_of(int code) { return gds::errno_of(code); }

std::string GdsEngine::words_of(int code) {
  const std::shared_ptr<gds::State> state = this->state();
  return state ? state->words_of(code) : cufile::words_of(code);
}

GdsMode parse_gds_mode(std::string_view name) {
  if (name == "threads") return GdsMode::kThreads;
  if (name == "async") return GdsMode::kStreams;
  throw std::invalid_argument("no GDS mode '" + std::string(name) + "': threads or async");
}

}  // namespace kvtier
