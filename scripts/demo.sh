#!/usr/bin/env bash
# Demo on real text, run by `make demo`: prepares Python's standard library as a data set, trains a small
# Mixture-of-Experts model on this data set with two ranks, evaluates the model, plots the metrics of the run,
# and samples text from the model. After a complete demo, the next demo keeps the data and trains a new model.
# After an interrupted demo, the next demo continues from the point of interruption.
set -euo pipefail
cd "$(dirname "$0")/.."

DEMO=${DEMO:-demo}
CONFIG=configs/run/demo.toml
DATA=$DEMO/data
RUN=$DEMO/run

step() {
    echo
    echo "\$ $*"
    "$@"
}

library=$(python -P -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
echo "Optimus demo: Python's standard library in $library; everything goes under $DEMO/"
mkdir -p "$DEMO"
# Some files have an invalid encoding on purpose, to test Python. These files are quarantined and counted.
text=(--input "$library/**/*.py" --exclude '*/site-packages/*' --on-error quarantine)

if [ ! -f "$DEMO/tokenizer.json" ]; then
    step optimus-data train-tokenizer "${text[@]}" --vocab-size 4096 --out "$DEMO/tokenizer.json"
fi
step optimus-data run "${text[@]}" --tokenizer "$DEMO/tokenizer.json" --context 256 \
    --eval-fraction 0.02 --workers 2 --out "$DATA"

if [ -f "$RUN/report.png" ]; then
    rm -rf "$RUN.previous"
    mv "$RUN" "$RUN.previous"
fi
step optimus train "$CONFIG" data.path="$DATA" train.run_dir="$RUN" --nproc 2
step optimus report "$RUN"
step optimus generate "$RUN" --prompt "def __init__(self" --tokens 80
step python scripts/demo_summary.py "$DEMO"
