from __future__ import annotations

from optimus.observe.log import indented


def test_text_of_a_model_sends_no_control_characters_to_the_terminal():
    text = "def f():\n\treturn 'é\u200d'\r\x1b[2J\x9b\x07\u202e\u2028\ud800"
    assert indented(text) == (
        "    def f():\n    \treturn 'é\u200d'\\r\\x1b[2J\\x9b\\x07\\u202e\\u2028\\ud800"
    )
