"""The child process of one engine: loads it, then answers one JSON request per line on stdin with one JSON line."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Serve requests {"prompt_ids": [...], "count": n}; the first line received says what to load."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr, not between the answers
    from engines import ENGINES

    def reply(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    setup = json.loads(sys.stdin.readline())
    try:
        engine = ENGINES[setup["engine"]](setup["path"], setup["threads"], setup["max_context"], setup["options"])
    except Exception as error:  # reported to the parent, which says so in its table
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    reply({"about": engine.about})
    for line in sys.stdin:
        request = json.loads(line)
        cpu = time.process_time()
        try:
            first, rest, tokens = engine.generate(request["prompt_ids"], request["count"])
        except Exception as error:
            reply({"error": f"{type(error).__name__}: {error}"})
            return
        reply({"first_s": first, "rest_s": rest, "cpu_s": time.process_time() - cpu, "token_ids": tokens})


if __name__ == "__main__":
    main()
