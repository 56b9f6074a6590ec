#!/bin/sh
# Every cost that docs/benchmarks.md takes from a machine that does nothing else, in fifteen to twenty minutes of two cores.
# Each record is written as it grows; started again, the script goes on where it was stopped.
#
#   sh benchmarks/quiet.sh                                  # into results/benchmarks, then the pages
#   PYTHON=.bench/bin/python sh benchmarks/quiet.sh         # an environment that has ivon-opt, too
#   SMALL=1 OUT=/tmp/quiet sh benchmarks/quiet.sh           # does everything run? its numbers mean nothing
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
out="${OUT:-results/benchmarks}"
PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
mkdir -p "$out"
quick=""
pictures="docs/images"
methods="map,bbb,vogn,ivon,noisy-kfac,noisy-kfac-dense,bbb-lrt"
small_nets="mlp,lenet5"
nets="mlp,mlp1200,lenet5,alexnet,resnet20,transformer,vit,lstm"
cases="mlp-2000,mlp-200,lenet5-250,resnet20-64,digits,digits28"
if [ "${SMALL:-0}" = 1 ]; then
    quick="--quick"
    pictures="$out"
    methods="map,noisy-kfac-dense"
    small_nets="mlp"
    nets="mlp,lstm"
    cases="mlp-200,digits"
fi

part() {
    echo "== $*" >&2
    "$python" -m "$@"
}

# 7 minutes: steps of eight networks.
part benchmarks.step_cost $quick --nets "$nets" --methods "$methods" --peers ivon-opt --rounds 6 --no-memory \
    --json "$out/steps.json"
# 1 minute: the same without compiled kernels.
CREDO_KERNELS=0 part benchmarks.step_cost $quick --nets "$small_nets" --methods map,bbb,vogn,ivon --peers none \
    --rounds 8 --no-memory --json "$out/steps_without_kernels.json"
# 2 minutes: predictions.
part benchmarks.predict_cost $quick --cases "$cases" --peers none --rounds 4 --json "$out/predictions.json"
# 4 minutes: processor time against width and batch.
part benchmarks.cost_size $quick --rounds 2 --json "$out/cost_size.json" --picture "$pictures/cost_and_size.png"
# 4 minutes, which do not need a quiet machine: bytes are counted.
part benchmarks.step_cost $quick --nets "$nets" --methods "$methods" --peers ivon-opt --memory-only \
    --json "$out/memory.json"
if [ "${SMALL:-0}" != 1 ]; then
    "$python" docs/make_results.py
fi
