// What two engines say to each other where the network cannot reach into memory by itself.
//
// A reader or writer says kHello with its own address and is welcomed with a number; it uses that
// in what it asks for. Numbers begin at random, so what an earlier process of the same address was
// told fits nothing. A new connection of a line takes the place of the one before: what that still
// brings is dropped, so once welcomed nobody need fear what was sent before. All in the machine's
// byte order; UCX connects like with like.
#pragma once
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "../shim/ucp.hpp"

namespace kvtier {

enum class UcxMessage : std::uint32_t {
  kHello = 0x6b760001,  ///< link: sender's connection; request: its line; payload: its address
  kWelcome,             ///< link: that connection; request: the number to use
  kGet,                 ///< link: that number; count: of parts; payload: parts
  kData,                ///< link: the connection; count: errno, or 0: payload has the parts' bytes
  kPut,                 ///< link: the number; count: of parts; payload: parts, then their bytes
  kPutDone,             ///< link: the connection; count: errno, or 0: the bytes are in memory
  kBye,                 ///< link: the number; nothing more will be asked by it
  kGone,                ///< link: the connection; nothing that came by it changes memory any more
};

struct UcxHead {
  UcxMessage message;
  std::uint32_t count;
  std::uint64_t link;
  std::uint64_t request;
};

/// Bytes of the receiver's memory.
struct UcxRange {
  std::uint64_t memory;  ///< number of a registered memory
  std::uint64_t address;
  std::uint64_t length;
};

static_assert(sizeof(UcxHead) == 24 && sizeof(UcxRange) == 24);
static_assert(std::is_trivially_copyable_v<UcxHead> && std::is_trivially_copyable_v<UcxRange>);

constexpr unsigned kUcxMessageId = 0;               // of UCX's ids; one is enough
constexpr std::uint32_t kUcxRangesMax = 64;         // in one message
constexpr std::uint64_t kUcxMessageMax = 16 << 20;  // bytes of data in one message

/// Send `head` and what `payload` lists; both must stay until the request has ended.
inline ucp::Request send_message(const ucp::Library& library, ucp::Endpoint endpoint,
                                 const UcxHead& head, std::span<const ucp::Iov> payload,
                                 void (*callback)(void*, ucp::Status, void*), void* user_data) {
  ucp::RequestParams params{};
  params.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData | ucp::kOpFlags;
  params.flags = ucp::kAmSendEager;  // the receiver reads it in place, and owns its own memory
  params.send_callback = callback;
  params.user_data = user_data;
  if (payload.size() > 1) {
    params.op_attr_mask |= ucp::kOpDatatype;
    params.datatype = ucp::kDatatypeIov;
    return library.am_send_nbx(endpoint, kUcxMessageId, &head, sizeof head, payload.data(),
                               payload.size(), &params);
  }
  return library.am_send_nbx(endpoint, kUcxMessageId, &head, sizeof head,
                             payload.empty() ? nullptr : payload[0].buffer,
                             payload.empty() ? 0 : payload[0].length, &params);
}

}  // namespace kvtier
