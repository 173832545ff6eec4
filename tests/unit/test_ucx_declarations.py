"""Our own declarations of UCX's API are those of its headers, wherever we use them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import libucx

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
#include <ucp/api/ucp.h>
#include "ucp.hpp"
namespace ours = kvtier::ucp;

#define SAME(a, b) static_assert(static_cast<long long>(a) == static_cast<long long>(b), #b)
#define FIELD(ours_t, ours_f, theirs_t, theirs_f)                                          \\
  SAME(offsetof(ours::ours_t, ours_f), offsetof(theirs_t, theirs_f));                      \\
  SAME(sizeof(ours::ours_t::ours_f), sizeof(theirs_t::theirs_f))

SAME(sizeof(ours::Status), sizeof(ucs_status_t));
SAME(ours::kOk, UCS_OK);
SAME(ours::kInProgress, UCS_INPROGRESS);
SAME(ours::kNoMemory, UCS_ERR_NO_MEMORY);
SAME(ours::kInvalidParam, UCS_ERR_INVALID_PARAM);
SAME(ours::kUnreachable, UCS_ERR_UNREACHABLE);
SAME(ours::kUnsupported, UCS_ERR_UNSUPPORTED);
SAME(ours::kLast, UCS_ERR_LAST);

SAME(ours::kParamFeatures, UCP_PARAM_FIELD_FEATURES);
SAME(ours::kParamMtWorkersShared, UCP_PARAM_FIELD_MT_WORKERS_SHARED);
SAME(ours::kFeatureRma, UCP_FEATURE_RMA);
SAME(ours::kFeatureWakeup, UCP_FEATURE_WAKEUP);
SAME(ours::kFeatureAm, UCP_FEATURE_AM);
FIELD(ContextParams, field_mask, ucp_params_t, field_mask);
FIELD(ContextParams, features, ucp_params_t, features);
FIELD(ContextParams, mt_workers_shared, ucp_params_t, mt_workers_shared);

SAME(ours::kWorkerParamThreadMode, UCP_WORKER_PARAM_FIELD_THREAD_MODE);
SAME(ours::kWorkerParamFlags, UCP_WORKER_PARAM_FIELD_FLAGS);
SAME(ours::kWorkerIgnoreRequestLeak, UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK);
SAME(ours::ThreadMode::kSerialized, UCS_THREAD_MODE_SERIALIZED);
SAME(sizeof(ours::CpuSet), sizeof(ucs_cpu_set_t));
FIELD(WorkerParams, field_mask, ucp_worker_params_t, field_mask);
FIELD(WorkerParams, thread_mode, ucp_worker_params_t, thread_mode);
FIELD(WorkerParams, flags, ucp_worker_params_t, flags);

SAME(ours::kEndpointParamRemoteAddress, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
SAME(ours::kEndpointParamErrorMode, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME(ours::kEndpointParamErrorHandler, UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME(ours::ErrorMode::kPeer, UCP_ERR_HANDLING_MODE_PEER);
FIELD(EndpointParams, field_mask, ucp_ep_params_t, field_mask);
FIELD(EndpointParams, address, ucp_ep_params_t, address);
FIELD(EndpointParams, error_mode, ucp_ep_params_t, err_mode);
FIELD(EndpointParams, error_handler, ucp_ep_params_t, err_handler);
FIELD(ErrorHandler, callback, ucp_err_handler_t, cb);
FIELD(ErrorHandler, argument, ucp_err_handler_t, arg);

SAME(ours::kMemoryParamAddress, UCP_MEM_MAP_PARAM_FIELD_ADDRESS);
SAME(ours::kMemoryParamLength, UCP_MEM_MAP_PARAM_FIELD_LENGTH);
FIELD(MemoryParams, field_mask, ucp_mem_map_params_t, field_mask);
FIELD(MemoryParams, address, ucp_mem_map_params_t, address);
FIELD(MemoryParams, length, ucp_mem_map_params_t, length);

SAME(ours::kOpCallback, UCP_OP_ATTR_FIELD_CALLBACK);
SAME(ours::kOpUserData, UCP_OP_ATTR_FIELD_USER_DATA);
SAME(ours::kOpDatatype, UCP_OP_ATTR_FIELD_DATATYPE);
SAME(ours::kOpFlags, UCP_OP_ATTR_FIELD_FLAGS);
SAME(ours::kOpMemory, UCP_OP_ATTR_FIELD_MEMH);
SAME(ours::kCloseForce, UCP_EP_CLOSE_FLAG_FORCE);
SAME(ours::kAmSendEager, UCP_AM_SEND_FLAG_EAGER);
SAME(ours::kDatatypeIov, ucp_dt_make_iov());
FIELD(Iov, buffer, ucp_dt_iov_t, buffer);
FIELD(Iov, length, ucp_dt_iov_t, length);
SAME(sizeof(ours::Iov), sizeof(ucp_dt_iov_t));
FIELD(RequestParams, op_attr_mask, ucp_request_param_t, op_attr_mask);
FIELD(RequestParams, flags, ucp_request_param_t, flags);
FIELD(RequestParams, send_callback, ucp_request_param_t, cb.send);
FIELD(RequestParams, datatype, ucp_request_param_t, datatype);
FIELD(RequestParams, user_data, ucp_request_param_t, user_data);
FIELD(RequestParams, memory, ucp_request_param_t, memh);

SAME(ours::kAmParamId, UCP_AM_HANDLER_PARAM_FIELD_ID);
SAME(ours::kAmParamFlags, UCP_AM_HANDLER_PARAM_FIELD_FLAGS);
SAME(ours::kAmParamCallback, UCP_AM_HANDLER_PARAM_FIELD_CB);
SAME(ours::kAmParamArgument, UCP_AM_HANDLER_PARAM_FIELD_ARG);
SAME(ours::kAmWholeMessage, UCP_AM_FLAG_WHOLE_MSG);
SAME(ours::kAmReceivedRendezvous, UCP_AM_RECV_ATTR_FLAG_RNDV);
FIELD(AmReceived, attributes, ucp_am_recv_param_t, recv_attr);
FIELD(AmHandlerParams, field_mask, ucp_am_handler_param_t, field_mask);
FIELD(AmHandlerParams, id, ucp_am_handler_param_t, id);
FIELD(AmHandlerParams, flags, ucp_am_handler_param_t, flags);
FIELD(AmHandlerParams, callback, ucp_am_handler_param_t, cb);
FIELD(AmHandlerParams, argument, ucp_am_handler_param_t, arg);

SAME(ours::kEndpointTransports, UCP_EP_ATTR_FIELD_TRANSPORTS);
FIELD(Transport, name, ucp_transport_entry_t, transport_name);
FIELD(Transport, device, ucp_transport_entry_t, device_name);
SAME(sizeof(ours::Transport), sizeof(ucp_transport_entry_t));
FIELD(EndpointAttributes, field_mask, ucp_ep_attr_t, field_mask);
FIELD(EndpointAttributes, name, ucp_ep_attr_t, name);
FIELD(EndpointAttributes, transports, ucp_ep_attr_t, transports.entries);
FIELD(EndpointAttributes, transport_count, ucp_ep_attr_t, transports.num_entries);
FIELD(EndpointAttributes, transport_bytes, ucp_ep_attr_t, transports.entry_size);


// Each function takes as many arguments as ours: the conversion of one to the other compiles.
template <typename R, typename... A> constexpr int arity(R (*)(A...)) { return sizeof...(A); }
#define FUNCTION(name, theirs) \\
  SAME(arity(static_cast<decltype(ours::Library::name)>(nullptr)), arity(&theirs))
FUNCTION(config_read, ucp_config_read);
FUNCTION(config_modify, ucp_config_modify);
FUNCTION(config_release, ucp_config_release);
FUNCTION(init_version, ucp_init_version);
FUNCTION(cleanup, ucp_cleanup);
FUNCTION(context_print_info, ucp_context_print_info);
FUNCTION(worker_create, ucp_worker_create);
FUNCTION(worker_destroy, ucp_worker_destroy);
FUNCTION(worker_get_address, ucp_worker_get_address);
FUNCTION(worker_release_address, ucp_worker_release_address);
FUNCTION(worker_progress, ucp_worker_progress);
FUNCTION(worker_get_efd, ucp_worker_get_efd);
FUNCTION(worker_arm, ucp_worker_arm);
FUNCTION(ep_create, ucp_ep_create);
FUNCTION(ep_close_nbx, ucp_ep_close_nbx);
FUNCTION(ep_flush_nbx, ucp_ep_flush_nbx);
FUNCTION(ep_rkey_unpack, ucp_ep_rkey_unpack);
FUNCTION(rkey_destroy, ucp_rkey_destroy);
FUNCTION(rkey_pack, ucp_rkey_pack);
FUNCTION(rkey_buffer_release, ucp_rkey_buffer_release);
FUNCTION(mem_map, ucp_mem_map);
FUNCTION(mem_unmap, ucp_mem_unmap);
FUNCTION(put_nbx, ucp_put_nbx);
FUNCTION(get_nbx, ucp_get_nbx);
FUNCTION(worker_set_am_recv_handler, ucp_worker_set_am_recv_handler);
FUNCTION(am_send_nbx, ucp_am_send_nbx);
FUNCTION(ep_query, ucp_ep_query);
FUNCTION(request_free, ucp_request_free);
FUNCTION(status_string, ucs_status_string);
"""


def _compile(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = folder / "declarations.cpp"
    source.write_text(program)
    assert libucx.__file__ is not None
    include = Path(libucx.__file__).parent / "include"
    shim = ROOT / "csrc" / "shim"
    return subprocess.run(
        [
            os.environ.get("CXX", "c++"),
            "-std=c++20",
            "-fsyntax-only",
            "-Wno-invalid-offsetof",
            f"-I{include}",
            f"-I{shim}",
            source,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_our_declarations_are_those_of_the_headers(tmp_path: Path) -> None:
    compiled = _compile(PROGRAM, tmp_path)
    assert compiled.returncode == 0, compiled.stderr


def test_a_wrong_one_would_be_seen(tmp_path: Path) -> None:
    wrong = PROGRAM + "SAME(ours::kWorkerParamFlags, UCP_WORKER_PARAM_FIELD_NAME);"
    assert "UCP_WORKER_PARAM_FIELD_NAME" in _compile(wrong, tmp_path).stderr
