#!/usr/bin/env bash
# Every benchmark on a machine with a GPU, in one go and within ten minutes:
#
#   experiments/gpu/run_all.sh OUT_DIR
#
# Leaves one file of JSON lines per benchmark in OUT_DIR (their keys: --help of each script), its
# progress beside it in a .log, and summary.txt with what ran, how long and how it ended. A benchmark
# that fails or runs out of time is listed there, the others go on, and the exit status is then 1.
#
# Shapes of OLMo-2-7B with random weights, sized for one H100 (80 GB). Smaller GPUs:
#   MODEL=pythia-2.8b BATCH_TOKENS=4096 ROWS=20000 experiments/gpu/run_all.sh OUT_DIR
# SMOKE=1 goes through everything at tiny sizes on any machine, to see that it runs.
# PYTHON names the interpreter (default: the checkout's .venv). ONLY="sketch_binned query" takes some.
# TOTAL are the seconds that all may take together, LIMIT those of one; TOTAL=100000 LIMIT=100000 for
# no hurry.
#
# docs/studies/gpu.md has what an H100 gave with these settings (kernels: more tiles and batches).
# Compiling takes most of the time of a first run.
set -u

if [ $# -ne 1 ]; then
    echo "error: one folder must be named for the results: $0 OUT_DIR" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
OUT="$(cd "$1" && pwd)"
cd "$(dirname "$0")/../.." || exit 2

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
SMOKE="${SMOKE:-0}" TOTAL="${TOTAL:-580}" LIMIT="${LIMIT:-180}" ONLY="${ONLY:-}"
FAILED=0

if [ "$SMOKE" = 1 ]; then
    MODEL="${MODEL:-pythia-14m}" BATCH_TOKENS="${BATCH_TOKENS:-128}" ROWS="${ROWS:-64}"
    SIZE="${SIZE:-256}" PROMPTS=2 ALONE=1 NEW_TOKENS=2 DECODE_BATCH=2 REPEATS=1
    DTYPE=float32 STEP_LENGTH=64 LENGTH=32 QUERY_DTYPES=float32 UNLEARN_BATCH=1
else
    MODEL="${MODEL:-olmo2-7b}" BATCH_TOKENS="${BATCH_TOKENS:-8192}" ROWS="${ROWS:-52000}"
    SIZE="${SIZE:-65536}" PROMPTS=256 ALONE=2 NEW_TOKENS=128 DECODE_BATCH=256 REPEATS=5
    DTYPE=bfloat16 STEP_LENGTH=256 LENGTH=128 QUERY_DTYPES=bfloat16 UNLEARN_BATCH=8
    # Ends at once, with a sentence, where JAX sees no GPU.
    "$PYTHON" -c 'import jax, sys; sys.exit(jax.default_backend() != "gpu")' || {
        echo "error: JAX sees no GPU: install the extra cuda12 or cuda13, or set SMOKE=1" >&2
        exit 1
    }
fi

SUMMARY="$OUT/summary.txt"
{
    date -u
    "$PYTHON" -c 'import jax; print("jax", jax.__version__, *(d.device_kind for d in jax.devices()))'
    git rev-parse HEAD 2>/dev/null
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    fi
    echo "MODEL=$MODEL BATCH_TOKENS=$BATCH_TOKENS ROWS=$ROWS SIZE=$SIZE SMOKE=$SMOKE"
} >"$SUMMARY" 2>&1

# measure NAME COMMAND...: JSON lines into NAME.jsonl, progress into NAME.log.
measure() {
    local name="$1" start=$SECONDS left=$((TOTAL - SECONDS)) status
    shift
    if [ -n "$ONLY" ] && [[ " $ONLY " != *" $name "* ]]; then
        return
    fi
    if [ "$left" -lt 5 ]; then
        echo "$name: not run, the $TOTAL s are over: raise TOTAL" | tee -a "$SUMMARY"
        FAILED=1
        return
    fi
    [ "$left" -gt "$LIMIT" ] && left=$LIMIT
    echo "$name ..."
    timeout "$left" "$PYTHON" "$@" >"$OUT/$name.jsonl" 2>"$OUT/$name.log"
    status=$?
    echo "$name: status $status after $((SECONDS - start)) s: $*" | tee -a "$SUMMARY"
    [ "$status" = 0 ] || FAILED=1
}

# What matters most comes first.
KERNELS=()
[ "$SMOKE" = 1 ] && KERNELS=(--params=4096 --batch=4 --dense=4 --rows=64 --tokens=64 --heads=2
    --side=64)
measure kernels experiments/bench/kernels.py --json --size="$SIZE" --repeats="$REPEATS" \
    "${KERNELS[@]}"
SKETCH=(experiments/bench/sketch.py --json "--model=$MODEL" "--size=$SIZE" "--dtype=$DTYPE"
    "--repeats=$REPEATS" "--length=$LENGTH" "--batch_tokens=$BATCH_TOKENS")
measure sketch_binned "${SKETCH[@]}"
measure unlearn experiments/bench/unlearn.py --json --model="$MODEL" --dtype="$DTYPE" \
    --batch_size="$UNLEARN_BATCH" --length="$STEP_LENGTH" --repeats="$REPEATS"
measure query experiments/bench/query.py --json --rows="$ROWS" --size="$SIZE" --dtypes="$QUERY_DTYPES" \
    --queries=1,8 --repeats="$REPEATS" --folder="$OUT/index"
rm -rf "$OUT/index"
measure decode experiments/bench/decode.py --json --model="$MODEL" --dtype="$DTYPE" \
    --prompts="$PROMPTS" --batch_size="$DECODE_BATCH" --new_tokens="$NEW_TOKENS" --alone="$ALONE"
measure sketch_dense "${SKETCH[@]}" --family=dense_rademacher --operand=bfloat16

echo "results in $OUT"
exit "$FAILED"
