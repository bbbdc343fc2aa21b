"""Programs and command lines are read out of texts as they were before they were printed."""

from __future__ import annotations

from pathlib import Path

from tests.snippets.extract import Snippet, read_snippets

PRINTED = """1.1 Offline

Import the class.

```
from vllm import LLM
```

Then run it.

```
llm = LLM(model="a/b")
```

1.2 An Example

Source https://example.com/blob/main/examples/hello_example.py.

```

8  import argparse
9
10 def main():

```

(continues on next page)

(continued from previous page)

```

11     text = "a \\
↪ b"
12     print(text)

```

1.3 Server

```
$ vllm serve a/b \\
$     --dtype half
```

```
model: not a program
```
"""
COPIED = """Start a server:

vllm
 serve <model> --dtype half

Or ask it:

    curl
     http://localhost:8000/v1/completions \\
        -d '{
            "model": "a"
        }'

From Python:

from
 vllm.entrypoints.llm import LLM

llm = LLM(

model="a/b",

)

Troubleshooting
More prose.
"""


def read(tmp_path: Path, text: str) -> list[Snippet]:
    path = tmp_path / "text.txt"
    path.write_text(text)
    return read_snippets(path)


def test_printed_listings_lose_their_numbers_prompts_and_page_breaks(tmp_path: Path) -> None:
    program, example, server, text = read(tmp_path, PRINTED)
    assert (program.kind, program.line, program.section) == ("python", 6, "1.1 Offline")
    assert program.source == 'from engine import LLM\nllm = LLM(model="a/b")'
    assert example.example == "hello_example"
    lines = [line for line in example.source.splitlines() if line]
    assert lines == ["import argparse", "def main():", '    text = "a \\b"', "    print(text)"]
    assert (server.kind, server.source) == ("shell", "quire serve a/b \\\n    --dtype half")
    assert text.kind == "text"


def test_copied_pages_have_no_fences_and_break_after_a_first_word(tmp_path: Path) -> None:
    server, question, program = read(tmp_path, COPIED)
    assert server.source == "quire serve <model> --dtype half"
    assert question.source.startswith("curl http://localhost:8000/v1/completions \\")
    assert question.source.endswith("}'")
    assert program.kind == "python"
    assert program.source.startswith("from engine.entrypoints.llm import LLM\n")
    assert program.source.rstrip().endswith(")")
