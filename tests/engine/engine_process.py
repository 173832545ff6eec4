"""One vLLM engine in a process of its own, driven by JSON lines; `engine.Engine` is the other end.

The first line is the job: vLLM's arguments and kvtier's configuration (absent: no connector). Each
further line is a command, answered by one line on the file descriptor that the environment names.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any


class Commands:
    """What the other end may ask for, one method a command."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        arguments = {
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 4096,
            "enforce_eager": True,
            "dtype": "float32",
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            **job["vllm"],
        }
        if job["kvtier"] is not None:
            arguments["kv_transfer_config"] = {
                "kv_connector": job["connector"][0],
                "kv_connector_module_path": job["connector"][1],
                "kv_role": "kv_both",
                "kv_connector_extra_config": job["kvtier"],
            }
        self._llm = LLM(**arguments)
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._tier: Any = None
        if job["kvtier"] is not None:
            self._tier = self._core.scheduler.connector._engine.tier

    def ready(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "blocks": self._core.scheduler.kv_cache_config.num_blocks}

    def generate(
        self, prompts: list[list[int]], max_tokens: int, **sampling: Any
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [_prompt(tokens) for tokens in prompts],
            SamplingParams(
                **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
            ),
            use_tqdm=False,
        )
        return [
            {
                "tokens": [list(completion.token_ids) for completion in output.outputs],
                "cached": output.num_cached_tokens,
                "ttft_s": output.metrics.first_token_latency if output.metrics else None,
                "first_token_s": output.metrics.first_token_ts if output.metrics else None,
                "last_token_s": output.metrics.last_token_ts if output.metrics else None,
                "reason": output.outputs[0].finish_reason,
            }
            for output in outputs
        ]

    def generate_salted(self, prompt: list[int], max_tokens: int, salt: str) -> dict[str, Any]:
        from vllm import SamplingParams

        output = self._llm.generate(
            [{**_prompt(prompt), "cache_salt": salt}],
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            use_tqdm=False,
        )[0]
        return {"tokens": [list(output.outputs[0].token_ids)], "cached": output.num_cached_tokens}

    def abort_while_loading(self, prompt: list[int]) -> dict[str, Any]:
        """Start a request whose hit must come from disk, and abort it while the load goes on."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.add_request("doomed", _prompt(prompt), sampling)
        engine.step()
        loading = len(self._core.scheduler.kv_holding_waiting)
        engine.abort_request(["doomed"])
        steps = 0
        while self._core.scheduler.has_requests() and steps < 10000:
            self._core.step()
            steps += 1
        manager = self._core.scheduler.kv_cache_manager
        return {
            "loading": loading,
            "free_blocks": manager.block_pool.get_num_free_blocks(),
            "left": len(self._core.scheduler.requests),
        }

    def use_load_mode(self, mode: str) -> None:
        import msgspec

        engine = self._core.scheduler.connector._engine
        engine.settings = msgspec.structs.replace(engine.settings, load=mode)

    def use_stores(self, on: bool) -> None:
        """For benchmarks: plan and do no stores, or do so again; lookups and loads go on."""
        import msgspec

        scheduler = self._core.scheduler.connector._scheduler
        scheduler.__dict__.pop("plan_stores", None)
        if not on:
            scheduler.plan_stores = lambda output, step: None
        engine = scheduler._engine
        engine.settings = msgspec.structs.replace(engine.settings, store_decoded=on)

    def sabotage_loads(self, zero: bool) -> None:
        """For the negative control: zero pages once they have been loaded, or stop doing so."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        worker.__dict__.pop("start_loads", None)
        if not zero:
            return
        start_loads = worker.start_loads

        def sabotage(step: Any) -> None:
            start_loads(step)
            for running in worker._in_step:
                running.load.wait()
                for tensor in worker._engine.pages.tensors:
                    tensor[list(running.order.pages)] = 0

        worker.start_loads = sabotage

    def reset_prefix_cache(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def move_to_disk(self, tokens: list[int]) -> int:
        """Leave the prompt's chunks on disk only."""
        connector = self._core.scheduler.connector
        return int(self._tier.move(connector._engine.space("", ""), tokens, "posix"))

    def flush(self) -> bool:
        return bool(self._tier.flush(60.0))

    def stat(self) -> dict[str, Any]:
        stat: dict[str, Any] = self._tier.stat()
        stat["preemptions"] = sum(
            int(metric.value)
            for metric in self._llm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )
        return stat

    def close(self) -> None:
        self._core.shutdown()


def _prompt(tokens: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": tokens}


def main() -> None:
    replies = os.fdopen(int(os.environ["ENGINE_REPLIES"]), "w", buffering=1)

    def reply(kind: str, value: Any) -> None:
        replies.write(json.dumps({kind: value}) + "\n")

    try:
        commands = Commands(json.loads(sys.stdin.readline()))
    except BaseException as error:
        reply("error", f"{type(error).__name__}: {error}")
        raise
    reply("value", commands.ready())
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            value = getattr(commands, name)(**arguments)
        except Exception as error:  # noqa: BLE001 - the other end is told
            traceback.print_exc()
            reply("error", f"{type(error).__name__}: {error}")
        else:
            reply("value", value)


if __name__ == "__main__":
    main()
