"""One adapter per engine: load a model once, then measure a prefill or a decode when asked.

An adapter's `generate(prompt_ids, count)` returns (seconds to the first token, seconds from the first to the last,
token ids if the engine gives them). To follow a change of Headrace's Python API, edit `Headrace` alone.
"""

from __future__ import annotations

import json
import time
from typing import Any

Timing = tuple[float, float, list[int]]


class Headrace:
    """Headrace's own package; times are those that `generate` reports: whole steps, the prompt's and the later ones."""

    def __init__(self, path: str, threads: int, max_context: int, options: dict[str, Any]) -> None:
        import headrace

        activations = options.pop("activations", "int16")
        self.engine = headrace.Engine.load(
            path, device="cpu", threads=threads, activations=activations, max_context=max_context, **options
        )
        self.about = {"version": headrace.__version__, "activations": activations}

    def generate(self, prompt_ids: list[int], count: int) -> Timing:
        result = self.engine.generate(prompt_ids, max_new_tokens=count, stop_tokens=[], progress=False)
        tokens = list(result.token_ids)
        return result.stats.prefill_seconds, result.stats.decode_seconds, tokens


class OrtGenai:
    """onnxruntime-genai: greedy search over a model directory, KV buffer sized to the request, no end token."""

    def __init__(self, path: str, threads: int, max_context: int, options: dict[str, Any]) -> None:
        import onnxruntime_genai as og

        self.og, self.max_context = og, max_context
        session = {"intra_op_num_threads": threads, **options.pop("session", {})}
        no_end = options.pop("unused_token_id", 49151)
        overlay = {"model": {"eos_token_id": no_end, "decoder": {"session_options": session}}}
        config = og.Config(path)
        config.overlay(json.dumps(overlay))
        self.model = og.Model(config)
        self.about = {"version": og.__version__, "session": session}

    def generate(self, prompt_ids: list[int], count: int) -> Timing:
        params = self.og.GeneratorParams(self.model)
        params.set_search_options(max_length=len(prompt_ids) + count, do_sample=False)
        generator = self.og.Generator(self.model, params)
        start = time.perf_counter()
        generator.append_tokens(prompt_ids)
        generator.generate_next_token()
        tokens = [int(generator.get_next_tokens()[0])]
        first = time.perf_counter()
        for _ in range(count - 1):
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        return first - start, time.perf_counter() - first, tokens


class XLlamaCpp:
    """llama.cpp through xllamacpp's in-process server; the times are llama.cpp's own, without Python and JSON."""

    def __init__(self, path: str, threads: int, max_context: int, options: dict[str, Any]) -> None:
        import xllamacpp

        p = xllamacpp.CommonParams()
        p.model.path = path
        p.n_ctx, p.n_parallel, p.n_batch, p.n_ubatch, p.verbosity = max_context, 1, 512, 512, 0
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads
        flash = bool(options.pop("flash_attention", True))
        p.flash_attn_type = xllamacpp.llama_flash_attn_type(int(flash))
        self.server = xllamacpp.Server(p)
        self.about = {
            "version": xllamacpp.__version__, "flash_attention": flash, "system": xllamacpp.get_system_info().strip()
        }  # fmt: skip

    def generate(self, prompt_ids: list[int], count: int) -> Timing:
        answer = self.server.handle_completions(
            {"prompt": prompt_ids, "n_predict": count, "temperature": 0, "samplers": ["temperature"],
             "ignore_eos": True, "cache_prompt": False}
        )  # fmt: skip
        t = answer["timings"] if isinstance(answer, dict) else json.loads(answer)["timings"]
        if t["prompt_n"] != len(prompt_ids) or t["predicted_n"] != count:
            raise RuntimeError(f"llama.cpp did other work than asked: {t}")
        return t["prompt_ms"] / 1e3, t["predicted_ms"] / 1e3, []


class LlamaCppPython:
    """llama.cpp through llama-cpp-python, which is built from source and so uses this machine's own instruction set."""

    def __init__(self, path: str, threads: int, max_context: int, options: dict[str, Any]) -> None:
        import llama_cpp

        flash = bool(options.pop("flash_attention", True))
        self.llama = llama_cpp.Llama(
            path, n_ctx=max_context, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
            flash_attn=flash, logits_all=False, verbose=False,
        )  # fmt: skip
        system = llama_cpp.llama_print_system_info().decode().strip()
        self.about = {"version": llama_cpp.__version__, "flash_attention": flash, "system": system}

    def generate(self, prompt_ids: list[int], count: int) -> Timing:
        self.llama.reset()
        start = time.perf_counter()
        stream = self.llama.generate(prompt_ids, temp=0.0, repeat_penalty=1.0, reset=False)
        tokens = [next(stream)]
        first = time.perf_counter()
        tokens += [next(stream) for _ in range(count - 1)]
        return first - start, time.perf_counter() - first, tokens


ENGINES = {
    "headrace": Headrace,
    "onnxruntime-genai": OrtGenai,
    "xllamacpp": XLlamaCpp,
    "llama-cpp-python": LlamaCppPython,
}
