"""Writes chats.json: ids and targets of TRL for every template and row of fixtures/families.py.

    python tests/golden/make_chats.py

The tokenizer is that of the packaged toy model. Each entry is a checksum, see `checksum` there, or
"refused". Needs the parity extra.
"""

import json
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "fixtures"))

import families  # noqa: E402

FILE = pathlib.Path(__file__).with_name("chats.json")


def main():
    import trl_rows

    made = {}
    for name, template in families.TEMPLATES.items():
        made[name] = {}
        for kind in ("messages", "completion"):
            source = template if kind == "messages" else families.unmarked(template)
            with tempfile.TemporaryDirectory() as folder:
                tokenizer = trl_rows.tokenizer_of(
                    families.TOY, source, eos=families.EOS, folder=folder
                )
                for row, record in families.records(kind).items():
                    try:
                        found = families.checksum(
                            *trl_rows.prepare(record, tokenizer, folder=folder)
                        )
                    except ValueError:
                        found = "refused"
                    made[name][f"{kind}/{row}"] = found
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in made.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
