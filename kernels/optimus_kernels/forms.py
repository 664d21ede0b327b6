"""Which form grouped matrix products take in this process: torch's own, or our loop over experts.

Neither is the faster one everywhere, so a run measures both once (`optimus.train.kernels`) and
keeps to the one it found. Until somebody chooses it is the loop, which works for every dtype.
"""

from __future__ import annotations

from optimus_kernels.cache import KernelError

FORMS = ("torch", "loop")

_form = "loop"


def grouped_gemm() -> str:
    """The form in force: "torch" or "loop"."""
    return _form


def use_grouped_gemm(form: str) -> None:
    """Let grouped products take this form from now on. Raises KernelError for an unknown one."""
    global _form
    if form not in FORMS:
        raise KernelError(f"grouped_gemm = {form!r}: it is one of {', '.join(FORMS)}")
    _form = form
