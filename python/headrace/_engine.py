"""The engine: a loaded model on a device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from headrace import _core
from headrace._arguments import prompts as prompt_arguments
from headrace._arguments.kinds import made_by, shown
from headrace._arguments.tables import (
    FLAG,
    LENGTH,
    LIMIT,
    NEW_TOKENS,
    PROGRESS,
    TEXT,
    Activations,
    Device,
    KvDtype,
    KvLayout,
    Placement,
    Policy,
)
from headrace._catalog import resolve
from headrace._chat import Message, conversation
from headrace._options import GenerateOptions, drawn_seed, fresh_seed, generate_options, load_options, share_of_device
from headrace._plan import Plan, Trade
from headrace._progress import GenerationProgress
from headrace._residency import TensorTrace
from headrace._results import BatchResult, Generation, Stream, generation, generation_stats
from headrace._serve import Server
from headrace._sizes import Share
from headrace._stats import Stats


class Engine:
    """A loaded model on a device. Made by `Engine.load`.

    The tokens depend on the model, the prompt and the options of the arithmetic (`activations`, `kv_dtype`), and on
    nothing else: not on the device, the number of threads, the batch, the chunks of a prompt, or what ran before.

    An engine may be used from several threads; its calls take turns, and release the GIL. Ctrl-C ends a call between
    two steps, and the engine stays usable.
    """

    def __init__(self, inner: _core.Engine) -> None:
        """Not for use: see `Engine.load`."""
        made_by("headrace.Engine.load(...)", inner, _core.Engine)
        self._inner = inner

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        device: Device = "auto",
        vram_limit: int | str | None = None,
        host_limit: int | str | None = None,
        placement: Placement = "auto",
        host_mapped_budget: int | str | None = None,
        headroom: int | str | None = None,
        max_context: int | None = None,
        max_batch: int = 8,
        prefill_chunk: int = 256,
        steps_in_flight: int | None = None,
        activations: Activations = "int16",
        kv_dtype: KvDtype = "float16",
        kv_layout: KvLayout = "head-major",
        threads: int | None = None,
        piece_bytes: int | str | None = None,
        ring_slots: int = 4,
        policy: Policy | None = None,
        pinned: Sequence[str] = (),
        pin_threshold: int | str | None = None,
        policy_budget: int | str | None = None,
    ) -> Engine:
        """Loads a model.

        Args:
            model: A GGUF file, a directory of the ONNX Runtime GenAI builder (or its `.onnx` file), or a name that
                `headrace.fetch` knows, such as `"smollm2-135m"`.
            device: `"auto"` picks the first NVIDIA card that can be used, else the CPU, and the stats say why; `"cuda"` is
                that card or an error; `"cpu"` computes on the host's cores, reading weights from the file's mapping;
                `"host-device"` does too, but in a memory of its own that is limited, mapped and streamed into as a card's
                is.
            vram_limit: Most bytes that everything on the device may take: an int, a size such as `"8GiB"`, or a percentage of the
                device's memory such as `"80%"`.
                Weights that don't fit are streamed. It holds for all engines of this process on a card together, and the last limit given
                counts; a host device is the engine's alone. Default: the one in force, else no limit.
            placement: Where weights are read from; never changes a token. `"auto"` keeps them all resident if they fit beside
                all KV, else streams, or reads in place where the link is measured to be faster so; `plan` and `stats()` say
                which and why; `"resident"` refuses a limit that can't hold everything; `"stream"` copies what is cold through
                a ring; `"zero-copy"` has kernels read it in place over the link, `"hybrid"` up to `host_mapped_budget`, and
                streams the rest; `"unmanaged"` keeps everything resident in plain allocations, KV for `max_batch` whole
                sequences included, counts it and enforces no limit.
            host_mapped_budget: Most bytes that a step reads in place; 0 keeps `"auto"` from it. Default: 2 GiB, but 256 MiB
                where Windows drives the card, and 0 on a platform that nobody has tried.
            host_limit: Most bytes of the host's memory that cards may page-lock, all engines of this process together; the last one given
                counts. What it refuses is copied through a bounded pool, and the stats say so. Default: the one in force, else 80% of
                the host's memory, or of its control group's.
            headroom: Bytes that stay free below `vram_limit`. Default: 0, but 512 MiB where Windows drives the card.
            max_context: Most positions of a sequence, prompt and new tokens together. Default: what the model declares.
            max_batch: Most sequences in work at once.
            prefill_chunk: Token rows of a prompt that go through one step. Changes speed and workspace, never a token.
            steps_in_flight: Steps that may be in flight at once, 1 to 8: the token of one is taken while the next one runs. 1 waits
                for each. A step behind one that a stop token ends is for nothing. Only greedy steps follow one another so; a
                device may allow fewer. Never changes a token. Default: 2 while every weight is resident, 1 while a step streams
                weights or reads them in place.
            activations: `"int16"` gives the model's own tokens; `"int8"` is faster and coarser.
            kv_dtype: Storage of keys and values. `"float32"` is for audits.
            kv_layout: Order of keys and values in a page. Never changes a token.
            threads: Threads that compute on the host. Default: the cores that this process may use.
            piece_bytes: Size of the pieces in which weights are placed and copied. Default: the device's own choice.
            ring_slots: Slots of the staging ring, through which streamed pieces pass.
            policy: Decide at every read of a piece what stays, as a cache does, instead of following the static schedule. For
                comparison: never changes a token, moves no fewer bytes, and is slower.
            pinned: Names of tensors, or patterns with `*` and `?`, that the policy never evicts.
            pin_threshold: Tensors of at most this size are pinned too.
            policy_budget: Weights that the policy may keep, if less than the static schedule would keep.

        Raises:
            BudgetError: `vram_limit` can't hold what has to fit; the text is the whole breakdown.
            ModelFormatError: A file is damaged.
            UnsupportedModelError: A file is sound, but asks for something that Headrace doesn't do.
            DeviceError: The device refused memory or failed.
            ValueError: An argument is out of range; the text names it, what was given, and what is allowed.
            TypeError: An argument is of another type; the text likewise.
            FileNotFoundError: There is no such file, and no model of that name in the catalogue.
            OSError: A file can't be read.
        """
        path = resolve(model)
        options = load_options(
            device=device,
            vram_limit=vram_limit,
            host_limit=host_limit,
            placement=placement,
            host_mapped_budget=host_mapped_budget,
            headroom=headroom,
            max_context=max_context,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            steps_in_flight=steps_in_flight,
            activations=activations,
            kv_dtype=kv_dtype,
            kv_layout=kv_layout,
            threads=threads,
            piece_bytes=piece_bytes,
            ring_slots=ring_slots,
            policy=policy,
            pinned=pinned,
            pin_threshold=pin_threshold,
            policy_budget=policy_budget,
        )
        return cls(_core.Engine.load(path, options))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` puts the tokens in front that the model wants there, unless the text starts with them already.
        `parse_special=False` makes control tokens in the text plain text, as text from outside should be.
        """
        return self._inner.encode(
            TEXT.check("text", text),
            add_special=FLAG.check("add_special", add_special),
            parse_special=FLAG.check("parse_special", parse_special),
        )

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `token_ids`."""
        ids = prompt_arguments.token_ids("token_ids", token_ids, self.vocab_size)
        return self._inner.decode(ids, skip_special=FLAG.check("skip_special", skip_special))

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """The text that the model's chat template makes of messages such as `{"role": "user", "content": "Hi"}`.

        Control tokens in messages can't be told from the template's own in that text: use `chat`, `stream_chat` or
        `chat_token_ids` for messages from outside.

        Args:
            messages: Mappings in the form of OpenAI's chat interface: `role`, `content` (a text, a list of text parts, or `None`
                beside `tool_calls`), and what else the template reads.
            tools: Descriptions of functions that the model may call.
            add_generation_prompt: End where the model's answer starts.
            variables: Further variables of the template, such as `enable_thinking=False`.

        Raises:
            HeadraceError: The model has no chat template, or the template refuses the messages.
            ValueError: The template would drop a field or variable, or a message is none. The text names it.
            TypeError: An argument is of another type.
        """
        flag = FLAG.check("add_generation_prompt", add_generation_prompt)
        return self._inner.apply_chat_template(*conversation(messages, tools, variables), add_generation_prompt=flag)

    def chat_token_ids(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[int]:
        """Token ids of a conversation: what `chat` generates from. Arguments and errors as for `apply_chat_template`.

        Control tokens that the template writes are control tokens; those in messages, tools and variables are plain text. They
        start with the model's first token once, whether or not the template writes it. Raises `HeadraceError` also where a
        message holds control tokens and the template doesn't allow to tell them from its own.
        """
        return self._chat_ids(messages, tools, variables, add_generation_prompt)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        speculation: int = 0,
        keep_logits: bool = False,
        progress: bool | None = None,
        **variables: object,
    ) -> Generation:
        """Answers a conversation. The other arguments and errors are those of `chat_token_ids` and `generate`."""
        return self.generate(
            self._chat_ids(messages, tools, variables),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_tokens=stop_tokens,
            speculation=speculation,
            keep_logits=keep_logits,
            progress=progress,
        )

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        speculation: int = 0,
        progress: bool | None = None,
        **variables: object,
    ) -> Stream:
        """Answers a conversation, giving the text piece by piece. Arguments and errors as for `chat`."""
        return self.stream(
            self._chat_ids(messages, tools, variables),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_tokens=stop_tokens,
            speculation=speculation,
            progress=progress,
        )

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        speculation: int = 0,
        keep_logits: bool = False,
        progress: bool | None = None,
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: list[str] | tuple[str, ...] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        speculation: int = 0,
        keep_logits: bool = False,
        progress: bool | None = None,
    ) -> list[Generation]: ...
    def generate(
        self,
        prompt: str | Sequence[int] | list[str] | tuple[str, ...] | Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        speculation: int = 0,
        keep_logits: bool = False,
        progress: bool | None = None,
    ) -> Generation | list[Generation]:
        """Continues a prompt, or each prompt of a list.

        A list is worked off as many at a time as `max_batch` and memory allow, each starting as soon as one before it has
        ended. The results are in the order of the prompts, and each is what its prompt gives alone, bit for bit.

        Args:
            prompt: Text, or token ids; or a list of either.
            max_new_tokens: Most new tokens. Default: until a stop token, or the end of the context.
            temperature: 0 is the greedy choice: the largest logit, of equal ones the lower id. Above 0 a token is drawn.
            top_k: Draw from the `top_k` most likely tokens; 0 for all.
            top_p: Draw from the smallest set of tokens whose probabilities add up to `top_p`; 1 for all.
            seed: Seed of the draws: the same seed gives the same tokens. Default: a fresh one for each prompt, which the result
                reports.
            stop_tokens: Tokens that end the generation and are not part of it. Default: the model's own; `()` for none.
            speculation: Most tokens that a step verifies beyond the one that it is for, drafted from what the sequence said
                before; 0 for none. Greedy choices only. Never changes a token: it saves steps where a text repeats itself.
            keep_logits: Keep the logits of each choice, `vocab_size` floats a token. For audits.
            progress: Show progress on standard error. Default: if that is a terminal and the call takes long.

        Raises:
            ContextLengthError: Prompt and `max_new_tokens` don't fit `max_context`.
            NonFiniteError: A logit is not finite.
            ValueError: An argument is out of range.
            TypeError: An argument is of another type.

        What is wrong with one prompt of a list is raised with its place in it.
        """
        checked = prompt_arguments.one_or_more("prompt", prompt, self.vocab_size)
        options = generate_options(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_tokens=self._stop_tokens(stop_tokens),
            speculation=speculation,
            keep_logits=keep_logits,
        )
        progress, new = PROGRESS.check("progress", progress), options["max_new_tokens"]
        if prompt_arguments.is_one(checked):
            ids = self._prompt_ids(checked)  # type: ignore[arg-type]
            with GenerationProgress(progress, new) as bars:
                return generation(self._inner.generate(ids, options, bars.callback), self, drawn_seed(options))
        requests = [(self._prompt_ids(p, f"prompt[{i}]"), options) for i, p in enumerate(checked)]  # type: ignore[arg-type]
        if seed is None and drawn_seed(options) is not None:
            requests = [(ids, {**options, "seed": fresh_seed()}) for ids, options in requests]
        with GenerationProgress(progress, new and new * len(requests)) as bars:
            rows = self._inner.generate_all(requests, bars.callback)
        seeds = [drawn_seed(options) for _, options in requests]
        return [generation(row, self, seed) for row, seed in zip(rows, seeds, strict=True)]

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_tokens: Sequence[int] | None = None,
        speculation: int = 0,
        progress: bool | None = None,
    ) -> Stream:
        """Continues a prompt, giving the text piece by piece. Arguments and errors as for `generate`.

        A piece always holds whole characters; all pieces together are `generate(...).text`. Progress is shown until the first
        token.
        """
        checked = prompt_arguments.prompt("prompt", prompt, self.vocab_size)
        options = generate_options(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_tokens=self._stop_tokens(stop_tokens),
            speculation=speculation,
        )
        bars = GenerationProgress(PROGRESS.check("progress", progress), None)
        inner = self._inner.stream(self._prompt_ids(checked), options, bars.prompt_callback)
        return Stream(inner, bars, drawn_seed(options))

    def serve(self) -> Server:
        """Starts continuous generation: a thread that takes requests at any time and works on `max_batch` of them at once.

            with engine.serve() as server:
                request = server.submit("Once upon a time", max_new_tokens=64)
                for piece in request.pieces():
                    print(piece, end="")
        """
        return Server(self, self._inner.serve())

    def decode_greedy_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        stop_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None,
        speculation: int = 0,
        progress: bool | None = None,
    ) -> BatchResult:
        """Continues several prompts greedily, up to `max_batch` of them in one step, each starting as soon as one before it has ended.

        Row `i` of the result is what prompt `i` gives alone, bit for bit. Arguments and errors as for `generate`.

        Args:
            prompts: Texts, or token ids, of any lengths.
            max_new_tokens: Most new tokens of each, or one number for each prompt.
            stop_tokens: Tokens that end a generation, or a sequence of them for each prompt. Default: the model's own.
            speculation: As for `generate`.
            progress: As for `generate`.

        Raises:
            ValueError: As many numbers or sequences as prompts are needed and there are not.
        """
        checked = prompt_arguments.prompts("prompts", prompts, self.vocab_size)
        most = prompt_arguments.for_each_prompt("max_new_tokens", max_new_tokens, len(checked), NEW_TOKENS)
        stops = prompt_arguments.stop_tokens_for_each("stop_tokens", stop_tokens, len(checked), self.vocab_size)
        one = generate_options(stop_tokens=[], speculation=speculation)
        progress = PROGRESS.check("progress", progress)
        default = self.eos_token_ids
        requests: list[tuple[list[int], GenerateOptions]] = [
            (
                self._prompt_ids(prompt, f"prompts[{i}]"),
                {**one, "max_new_tokens": new, "stop_tokens": default if stop is None else stop},
            )
            for i, (prompt, new, stop) in enumerate(zip(checked, most, stops, strict=True))
        ]
        with GenerationProgress(progress, sum(most)) as bars:
            rows = self._inner.generate_all(requests, bars.callback)
        lengths = np.array([len(row[0]) for row in rows], dtype=np.int32)
        token_ids = np.full((len(rows), int(lengths.max(initial=0))), -1, dtype=np.int32)
        for i, row in enumerate(rows):
            token_ids[i, : lengths[i]] = row[0]
        return BatchResult(
            token_ids=token_ids,
            lengths=lengths,
            finish_reasons=tuple(row[1] for row in rows),
            stats=tuple(generation_stats(row) for row in rows),
        )

    def logits(self, sequences: Sequence[Sequence[int]], *, last_only: bool = False) -> npt.NDArray[np.float32]:
        """Logits of the token rows of `sequences`, one sequence after the other: `(rows, vocab)`, float32.

        Row `j` of a sequence is what the model says after its first `j + 1` tokens. `last_only` gives one row a sequence.
        """
        checked = prompt_arguments.sequences("sequences", sequences, self.vocab_size)
        return self._inner.logits(checked, last_only=FLAG.check("last_only", last_only))

    @property
    def plan(self) -> Plan:
        """What a step reads, and from where, as it is now."""
        return Plan.from_json(self._inner.plan(None))

    def trade(self, length: int | None = None) -> Trade | None:
        """What batches of sequences of `length` positions (default: `max_context`) take and save under the limit.

        `None` on a device that reads weights in place.
        """
        return Plan.from_json(self._inner.plan(LENGTH.check("length", length))).trade

    @property
    def max_context(self) -> int:
        """Most positions of a sequence."""
        return self._inner.max_context

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self._inner.vocab_size

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a generation by the model's own word."""
        return self._inner.eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        """True if the model's files hold a chat template."""
        return self._inner.has_chat_template

    def stats(self) -> Stats:
        """Everything counted since `reset_stats`, and the gauges."""
        return Stats.from_dict(json.loads(self._inner.stats()))

    def set_vram_limit(self, vram_limit: int | str) -> None:
        """Changes the memory limit of the live engine, whole or not at all.

        Raises `BudgetError` if the new limit can't hold what has to fit, `HeadraceError` if live sequences were promised
        more, and `ValueError` on a device that has no limit. Nothing has changed then.
        """
        limit = LIMIT.check("vram_limit", vram_limit)
        if isinstance(limit, Share):
            limit = share_of_device("vram_limit", str(vram_limit), limit, self._inner.device)
        self._inner.set_vram_limit(limit)

    def weight_checksums(self) -> list[int | None]:
        """A checksum of every piece of weights that is resident, read back from the device; `None` for the others.

        In read order; empty on a device that reads weights in place. For audits: no step may ever change one.
        """
        return self._inner.weight_checksums()

    def residency_trace(self) -> tuple[TensorTrace, ...]:
        """What the policy made of the reads of each tensor since `reset_stats`, in read order; empty without a policy."""
        return tuple(TensorTrace.from_dict(entry) for entry in json.loads(self._inner.residency_trace()))

    def reset_stats(self) -> None:
        """Opens a new window: totals and the trace of a policy start at 0, gauges stay."""
        self._inner.reset_stats()

    def _chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, object],
        add_generation_prompt: bool = True,
    ) -> list[int]:
        flag = FLAG.check("add_generation_prompt", add_generation_prompt)
        return self._inner.chat_token_ids(*conversation(messages, tools, variables), add_generation_prompt=flag)

    def _prompt_ids(self, prompt: str | list[int], name: str = "prompt") -> list[int]:
        """Token ids of a prompt that was checked; `name` is what an error calls it."""
        if not isinstance(prompt, str):
            return prompt
        ids = self._inner.encode(prompt, add_special=True, parse_special=True)
        if not ids:
            raise ValueError(f"{name} = {shown(prompt)}: must hold at least one token")
        return ids

    def _stop_tokens(self, stop_tokens: Sequence[int] | None) -> list[int]:
        """Stop tokens, checked; the model's own by default."""
        checked = prompt_arguments.stop_tokens("stop_tokens", stop_tokens, self.vocab_size)
        return self.eos_token_ids if checked is None else checked
