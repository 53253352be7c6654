#!/usr/bin/env bash
# Test and measure dtckpt on a machine with a CUDA GPU, without network, in under nine minutes:
#
#     bash benchmarks/gpu.sh OUT_FOLDER [WHEELS_FOLDER]
#
# WHEELS_FOLDER (default wheels/, if it is there) holds what Python lacks there; `make wheels` fills it elsewhere.
# OUT_FOLDER gets summary.txt (every step, how it ended, its seconds), versions.txt, tests.txt and benchmarks.txt.
# Steps come in order of importance; those that find no time left are skipped, and the summary says so.
# PYTHON is the interpreter, default python3; BUDGET_S the seconds for everything, default 520.
# Exits with 1 if a step failed or was skipped. Without a GPU the tests skip, and the benchmarks are left out.
set -uo pipefail

out=${1:?usage: bash benchmarks/gpu.sh OUT_FOLDER [WHEELS_FOLDER]}
mkdir -p "$out" && out=$(realpath "$out") || exit 2
wheels=$(realpath "${2:-$(dirname "$0")/../wheels}")
cd "$(dirname "$0")/.." || exit 2

python=${PYTHON:-python3}
budget=${BUDGET_S:-520}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH=$site:$PWD:$PWD/server PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# Plugins that happen to be installed would take part, and their warnings are errors here.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
# Seconds that tests leave to the benchmarks, however long they take.
RESERVED_S=250
folder=$([ -w /dev/shm ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")
failed=0
rm -f "$out"/{summary,versions,tests,benchmarks}.txt

note() {
    echo "$*" | tee -a "$out/summary.txt"
}

# step LIMIT_S LOG NAME COMMAND...: run a command with a limit, or what is left of the budget if that is less.
step() {
    local limit=$1 log=$out/$2 name=$3 start=$SECONDS left=$((budget - SECONDS)) status
    shift 3
    if ((left < 5)); then
        note "skipped, the time is up: $name"
        failed=1
        return 1
    fi
    echo "== $name: $*" >>"$log"
    timeout --kill-after=5 $((limit < left ? limit : left)) "$@" >>"$log" 2>&1
    status=$?
    case $status in
    0) note "ok, $((SECONDS - start)) s: $name" ;;
    124 | 137) note "FAILED after its $((SECONDS - start)) s: $name; see $(basename "$log")" ;;
    *) note "FAILED with $status, $((SECONDS - start)) s: $name; see $(basename "$log")" ;;
    esac
    ((status == 0)) || failed=1
    return $status
}

# --- what is here ---

if compgen -G "$wheels/*.whl" >/dev/null; then
    step 60 versions.txt "install the wheels" "$python" -m pip install --quiet --no-index --no-deps --no-compile \
        --no-cache-dir --disable-pip-version-check --target "$site" "$wheels"/*.whl || exit 1
fi
step 60 versions.txt "versions" "$python" -m benchmarks.gpu_versions || exit 1
tail -n +1 "$out/versions.txt"
has_gpu=$("$python" -c 'import torch; print(int(torch.cuda.is_available()))')
if ((!has_gpu)); then
    note "no GPU: tests that need one skip, benchmarks are left out"
fi

# --- tests, the most important first: each has 90 seconds; one that hangs ends its process, and others go on in a new one ---

step $((budget > RESERVED_S ? budget - RESERVED_S : budget)) tests.txt "tests marked cuda" "$python" -m pytest -p xdist -p pytest_timeout \
    -p no:cacheprovider -n 4 --timeout 90 --timeout-method thread --durations 20 -v -m cuda \
    tests/checkpoint/test_rng_state.py tests/checkpoint/test_round_trip.py tests/checkpoint/saving/test_save_async.py tests/comm/test_host_memory.py \
    tests/dtensor/test_components.py tests/redistribution/test_redistribution.py tests/comm/test_collectives.py \
    tests/dtensor/operators/test_gpt.py tests/dtensor/operators/test_context_parallel.py tests/dtensor/test_random.py
grep -hE '^(FAILED|ERROR) |^=+ .*(passed|failed|skipped|error)' "$out/tests.txt" | tee -a "$out/summary.txt"

# --- benchmarks ---

if ((has_gpu)); then
    step 150 benchmarks.txt "benchmark: saves, host waits, graphs" "$python" -m benchmarks.gpu --folder "$folder"
    step 40 benchmarks.txt "benchmark: redistribution on one GPU" "$python" -m benchmarks.local_redistribute --device cuda
    step 40 benchmarks.txt "benchmark: dispatch" "$python" -m benchmarks.dispatch --device cuda --rounds 20 --axes 1
    step 60 benchmarks.txt "benchmark: training step" "$python" -m torch.distributed.run --standalone --nproc-per-node 1 \
        -m benchmarks.train_step --device cuda
    step 60 benchmarks.txt "example: GPT" "$python" -m examples.gpt --device cuda
    step 120 benchmarks.txt "demo: four clients, and two, share the GPU" "$python" -m examples.demo --device cuda --output "$site/demo"
    cat "$out/benchmarks.txt"
fi

note "all of it: $SECONDS of $budget s"
exit $failed
