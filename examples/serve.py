"""Three ways to take tokens from one engine at once: a list, threads, an event loop."""

from __future__ import annotations

import argparse
import asyncio
import threading

import headrace

PROMPTS = ["The capital of France is", "Once upon a time", "Water boils at", "The opposite of cold is"]


def from_a_list(engine: headrace.Engine) -> None:
    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, max_new_tokens=12), strict=True):
        print(f"list:    {prompt}{result.text!r}")


def from_threads(engine: headrace.Engine) -> None:
    def ask(prompt: str) -> None:
        request = server.submit(prompt, max_new_tokens=12)
        text = "".join(request.pieces())
        print(f"threads: {prompt}{text!r}, after a wait of {request.waited_steps} steps")

    with engine.serve() as server:
        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


async def from_an_event_loop(engine: headrace.Engine) -> None:
    async def ask(server: headrace.Server, prompt: str) -> None:
        request = server.submit(prompt, max_new_tokens=12, speculation=4)
        async for token in request:
            if token in engine.encode("."):
                request.cancel()
        result = await request
        print(f"asyncio: {prompt}{result.text!r}, {result.finish_reason}")

    async with engine.serve() as server:
        await asyncio.gather(*(ask(server, prompt) for prompt in PROMPTS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "model", nargs="?", default="smollm2-135m",
        help="a GGUF file, an ONNX GenAI directory, or a name that `headrace fetch` knows (default: %(default)s)",
    )  # fmt: skip
    engine = headrace.Engine.load(parser.parse_args().model, max_batch=4)
    from_a_list(engine)
    from_threads(engine)
    asyncio.run(from_an_event_loop(engine))
    print(f"{engine.stats().tokens.emitted} tokens in {engine.stats().tokens.steps} steps")


if __name__ == "__main__":
    main()
