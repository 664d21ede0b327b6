"""scripts/bench/checkpoint.py, run on two ranks, measures all methods and leaves no file."""

from __future__ import annotations

import json

from checkpoint import main


def test_all_methods_are_measured_and_no_file_remains(tmp_path, capfd):
    arguments = ["--dir", str(tmp_path), "--ranks", "2", "--hidden", "128", "--rounds", "1"]
    main([*arguments, "--json"])
    (result,) = json.loads(capfd.readouterr().out)["ranks"]
    assert result["ranks"] == 2 and result["bytes"] >= 2 * result["bytes_of_a_rank"] * 0.9
    for phase in ("save", "load"):
        assert set(result[phase]["s"]) == {"ours", "cached", "raw", "dcp", "torch"}
        assert set(result[phase]["ours_by"]) == {"cached", "raw", "dcp", "torch"}
    assert set(result["verify"]["s"]) == {"ours", "raw"}
    assert set(result["stall"]["s"]) == {"ours", "copy"}
    assert all(seconds > 0 for seconds in result["stall"]["s"]["ours"])
    # Optimus allocates two blocks of 4 MiB and little more. torch.load copies all 40 MB of a rank.
    assert max(result["peak_bytes"]["ours"].values()) < 0.3 * result["bytes_of_a_rank"]
    assert list(tmp_path.iterdir()) == []
