"""Entry point of the `optimus` command and of `python -m optimus`.

Until `optimus.cli.process` installs Python's handler of SIGINT, Ctrl-C ends the process by the
signal's default action. Python's handler would print a traceback of the import that Ctrl-C
interrupts.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else inherited as ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    from optimus.cli import process

    process()


if __name__ == "__main__":
    main()
