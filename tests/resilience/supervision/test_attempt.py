"""Tests of the progress page: the file through which a rank reports its progress to its agent."""

from __future__ import annotations

from optimus.errors import OutcomeKind
from optimus.resilience.supervision.attempt import ProgressPage, create_page, read_page


def test_page_has_the_first_error_of_the_rank(tmp_path):
    """A rank that has an error can then also report that it has lost the other ranks. The page must
    keep the first report, which is the cause."""
    create_page(tmp_path / "page")
    page = ProgressPage(tmp_path / "page")
    assert read_page(tmp_path / "page").failure == 0
    page.fail(OutcomeKind.FAILED.exit_status)
    page.fail(OutcomeKind.LOST_PEER.exit_status)
    assert read_page(tmp_path / "page").failure == OutcomeKind.FAILED.exit_status


def test_page_has_the_phase_and_the_seconds_of_complete_phases(tmp_path):
    create_page(tmp_path / "page")
    page = ProgressPage(tmp_path / "page")
    page.enter("load", 0)
    page.enter("update", 1)
    page.collective("dp", "all_reduce", 8)
    page.enter("save", 1)
    progress = read_page(tmp_path / "page")
    assert (progress.step, progress.phase, progress.updates, progress.collectives) == (
        1,
        "save",
        1,
        1,
    )
    assert progress.seconds.keys() == {"start", "load", "update", "evaluation", "save"}
    assert progress.seconds["update"] > 0 == progress.seconds["save"]
