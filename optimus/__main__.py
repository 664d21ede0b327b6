"""Entry point of the `optimus` command and of `python -m optimus`.

During the imports, SIGINT has its default action, so that Ctrl-C prints no traceback.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if inherited as ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    from optimus.cli import process

    process()


if __name__ == "__main__":
    main()
