from __future__ import annotations

from pathlib import Path

from optimus.config import Config
from optimus.config.reference import settings_text


def test_page_is_generated_from_the_docstrings():
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == settings_text(), (
        "run: python -m optimus.config.reference > docs/configuration.md"
    )


def test_plain_text_lists_all_settings():
    text = settings_text(markdown=False)
    for name, section in Config.model_fields.items():
        assert f"[{name}]" in text
        for key in section.annotation.model_fields:
            assert f"  {key} (" in text
