"""Entry point of the `optimus` command and of `python -m optimus`.

While modules are imported, SIGINT has its default action: Ctrl-C ends the process without a
message. Python's own handler would print a traceback of the interrupted import. After the imports,
`optimus.cli.process` installs Python's handler again.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if inherited as ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    from optimus.cli import process

    process()


if __name__ == "__main__":
    main()
