#!/bin/sh
# Costs on the accelerator of this machine, in about ten minutes: steps by method and precision, predictions by draws,
# and the kernels that a step launches. On a machine without one it runs on the CPU, where SMALL=1 takes a minute.
#
#   sh benchmarks/gpu.sh                     # tables on stdout
#   DEVICE=cuda:1 sh benchmarks/gpu.sh | tee gpu.txt
#   SMALL=1 PYTHON=.venv/bin/python sh benchmarks/gpu.sh
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
device="${DEVICE:-auto}"
PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH

if [ "${SMALL:-0}" = 1 ]; then
    "$python" -m benchmarks.gpu --device "$device" --network lenet5 --batch 16 --rounds 3 \
        --methods MAP,BBB --forms float32,bfloat16 --draws 1 4
else
    "$python" -m benchmarks.gpu --device "$device" --network lenet5 --batch 128
    "$python" -m benchmarks.gpu --device "$device" --network resnet20 --batch 128
    "$python" -m benchmarks.gpu --device "$device" --network resnet20 --batch 128 \
        --methods MAP,BBB,IVON --forms float32,compile --draws
fi
# What a step launches, counted on the CPU: the same on every device.
"$python" -m benchmarks.launches
