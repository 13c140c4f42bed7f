"""Writes sentencepiece.json: a small llama-type vocabulary, and what sentencepiece itself makes of some texts.

    pip install sentencepiece && python make_sentencepiece.py
"""

import io
import json
import pathlib
import random

import sentencepiece

HERE = pathlib.Path(__file__).parent

WORDS = """the water runs down from the weir into a long channel and then over the wheel of the mill while the miller
watches the gate because too much water breaks the wheel and too little grinds no corn in spring when the snow melts
the channel is full and the stones turn all night aaaa aaab baaa bbaa abab in summer the stream is thin and the farmers
wait with their sacks they talk about the weather the price of bread and whose turn it is 1 2 3 12 23 123 2024 1999 the
gate is opened by a quarter then by a half café naïve über größe the wheel groans and begins to move she said that it
was not the mill but the river that decided when there would be flour and he replied that a river decides nothing
x = y + 1; if (x > 2) { return foo(bar); } print("hello") # comment
""".split()

TEXTS = [
    "", " ", "  ", "the water", " the water", "the  water  ", "wheel\nmill", "a", "aaaaaaaaaaaaaaaa", "abababab baaaab",
    "Zürich größe café", "日本語", "🙂 the 🙂🙂", "é", "1234567890", "x = y + 1;\n\tfoo(bar)", "<s>the</s>", "</s>",
    "▁the", "the▁mill", "\u0000", "don't", "THE WATER", "thewaterrunsdown", "\n\n\n", "…—“”",
]


def main():
    rng = random.Random(1)
    corpus = [" ".join(rng.choices(WORDS, k=12)) for _ in range(2000)]
    corpus += [" ".join(WORDS)] * 50
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=model, model_type="bpe", vocab_size=600, byte_fallback=True,
        character_coverage=0.999, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, allow_whitespace_only_pieces=True, minloglevel=2, hard_vocab_limit=False,
        unk_id=0, bos_id=1, eos_id=2, pad_id=-1,
    )
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    n = sp.get_piece_size()
    kinds = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1 for i in range(n)]
    texts = TEXTS[:]
    alphabet = "abcdehilmnorstw  .,0123é\n"
    texts += ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(150)]
    texts += ["".join(rng.choices("ab ", k=rng.randrange(1, 30))) for _ in range(100)]
    texts += [" ".join(rng.choices(WORDS, k=rng.randrange(1, 15))) for _ in range(50)]
    cases = []
    for text in texts:
        # Control symbols in a text are none to sentencepiece; there they are left out.
        if "<s>" in text or "</s>" in text:
            continue
        ids = sp.encode(text)
        cases.append({"text": text, "ids": ids, "decoded": sp.decode(ids)})
    out = {
        "tokens": [sp.id_to_piece(i) for i in range(n)],
        "scores": [sp.get_score(i) for i in range(n)],
        "token_types": kinds,
        "cases": cases,
    }
    lines = [f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in out.items() if k != "cases"]
    rows = ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases)
    text = "{\n" + ",\n".join(lines) + ',\n"cases": [\n' + rows + "\n]}\n"
    (HERE / "sentencepiece.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
