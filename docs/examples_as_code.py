"""Shows the `Example:` section of a docstring as a block of code in the API reference."""

import re
import textwrap

import griffe

_SECTION = re.compile(r"^Example:\n((?:[ \t]+.*(?:\n|$)|\n)+)", re.MULTILINE)


def _fence(section: re.Match[str]) -> str:
    code = textwrap.dedent(section[1]).strip("\n")
    return textwrap.indent(f"```py\n{code}\n```", "  ").join(["Examples:\n", "\n"])


class ExamplesAsCode(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring:
            obj.docstring.value = _SECTION.sub(_fence, obj.docstring.value)
