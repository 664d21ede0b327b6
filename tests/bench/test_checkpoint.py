"""`optimus bench checkpoint` on real ranks, small: what it tells, and that it leaves nothing."""

from __future__ import annotations

import json

from optimus.cli import main


def test_all_ways_take_turns_and_nothing_is_left(tmp_path, capfd):
    arguments = ["--dir", str(tmp_path), "--ranks", "2", "--hidden", "128", "--rounds", "1"]
    assert main(["bench", "checkpoint", *arguments, "--json"]) == 0
    (found,) = json.loads(capfd.readouterr().out)["ranks"]
    assert found["ranks"] == 2 and found["bytes"] >= 2 * found["bytes_of_a_rank"] * 0.9
    for what in ("save", "load"):
        assert set(found[what]["s"]) == {"ours", "cached", "raw", "dcp", "torch"}
        assert set(found[what]["ours_by"]) == {"cached", "raw", "dcp", "torch"}
    assert set(found["verify"]["s"]) == {"ours", "raw"}
    assert set(found["stall"]["s"]) == {"ours", "copy"}
    assert all(seconds > 0 for seconds in found["stall"]["s"]["ours"])
    # Two blocks of 4 MiB and little beside: no copy of all (of 40 MB, as torch.load makes one).
    assert max(found["peak_bytes"]["ours"].values()) < 0.3 * found["bytes_of_a_rank"]
    assert list(tmp_path.iterdir()) == []
