#!/bin/bash
# Builds the CUDA rows, their test and their benchmark on a machine with a GPU and nvcc, and runs them.
#   tests/cuda/session.sh [test|bench|all] [filter]     default: all; filter: text that test cases must contain
# Needs about half a minute of building on 16 cores, a minute of tests, half a minute of benchmarks. Exit status: of the tests.
set -u
what=${1:-all} filter=${2:-}
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${TILEWISE_CUDA_BUILD:-/tmp/tilewise-cuda-session}
arch=${TILEWISE_CUDA_ARCH:-90a}
out=${OUT:-$build}
mkdir -p "$build" && cd "$build" || exit 1
start=$(date +%s)
export NVCC="nvcc -std=c++20 -O3 -gencode=arch=compute_$arch,code=sm_$arch -I$root/src -I$root/include -Xptxas -warn-spills -diag-suppress 20012"
sm90=$([ "$arch" = 90a ] && echo -DTILEWISE_SM90)
export CXXC="g++ -std=c++20 -O2 $sm90 -I$root/src -I$root/include -I$root/tests/cuda -I${CUDA_HOME:-/usr/local/cuda}/include"
jobs=""
while IFS='(, )' read -r family element head_dim _; do
  case $family in TW_*_SM80) ;; TW_*_SM90) [ "$arch" = 90a ] || continue ;; *) continue ;; esac
  name=$(echo "${family#TW_}" | tr 'A-Z' 'a-z')
  unit=${name}_${element}_$head_dim
  sed "s/@ELEMENT@/$element/g;s/@HEAD_DIM@/$head_dim/g" "$root/src/cuda/$name.cu.in" > "$unit.cu"
  jobs+="$NVCC -c $unit.cu -o $unit.o"$'\n'
done < "$root/src/cuda/kernels.def"
jobs=$(echo "$jobs" | sort -t_ -k4 -n -r)$'\n'  # the long ones (large head dims) first
for unit in utility backward_utility; do jobs+="$NVCC -c $root/src/cuda/$unit.cu -o $unit.o"$'\n'; done
for unit in backend device fill_params forward backward ${sm90:+forward_sm90_backend backward_sm90_backend tensor_map}; do jobs+="$CXXC -c $root/src/cuda/$unit.cpp -o $unit.o"$'\n'; done
for unit in core/problem cpu/reference cpu/reference_forward cpu/reference_backward cpu/thread_pool cpu/kv_append; do
  jobs+="$CXXC -O3 -march=x86-64-v3 -c $root/src/$unit.cpp -o $(basename $unit).o"$'\n'
done
for unit in rows_test backward_repeat bench; do jobs+="$CXXC -c $root/tests/cuda/$unit.cpp -o $unit.o"$'\n'; done
echo "$jobs" | grep . | tr '\n' '\0' | xargs -0 -P "$(nproc)" -I{} sh -c '{} 2>&1' > make.log || { grep -E "error" make.log; exit 1; }
grep -E "spilled" make.log | sed 's/.*function//;s/_ZN8tilewise4cuda//' | cut -c1-110 | sort > spills.log
objects="${sm90:+forward_sm90_backend.o backward_sm90_backend.o tensor_map.o} backend.o device.o fill_params.o forward.o backward.o utility.o backward_utility.o problem.o reference.o reference_forward.o
  reference_backward.o thread_pool.o kv_append.o $(ls forward_sm*_k*.o backward_sm*_k*.o)"
for program in rows_test backward_repeat bench; do nvcc -o $program $program.o $objects -cudart static -lpthread || exit 1; done
echo "built in $(($(date +%s) - start)) s; $(wc -l < spills.log) kernels spill (spills.log)"
cp make.log spills.log "$out/" 2> /dev/null
status=0
if [ "$what" != bench ]; then
  pids=()
  for pass in forward backward; do
    for part in bf16-single bf16-batch f16-single f16-batch; do
      batch="b=1 "
      [ ${part#*-} = batch ] && batch="b=[^1]"
      ./rows_test $pass " ${part%-*} $batch" "$filter" > "$out/$pass-$part.log" 2>&1 &
      pids+=($!)
    done
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  ./backward_repeat || status=1
  for log in "$out"/forward-*.log "$out"/backward-*.log; do
    echo "$(basename "$log"): $(tail -1 "$log")"
    grep -A2 ^FAIL "$log" | cut -c1-160 | head -12
  done
fi
if [ "$what" != test ]; then
  for d in 64 128 256; do
    h=$((2048 / d))
    for s in "b=1 hq=$h sq=16384" "b=8 hq=$h sq=2048"; do
      ./bench "fwd bf16 $s d=$d" "fwd bf16 $s d=$d causal" "bwd bf16 $s d=$d" "bwd bf16 $s d=$d causal"
    done
    s="b=1 hq=$h sq=16384"
    ./bench "fwd bf16 $s d=$d dropout=0.1" "fwd bf16 $s d=$d softcap=30" "bwd bf16 $s d=$d deterministic" "bwd bf16 $s d=$d dropout=0.1"
  done | cut -c1-128 | tee "$out/bench.log"
  ./bench "fwd bf16 b=1 hq=32 hk=8 sq=1 sk=4096 d=128" "fwd bf16 b=16 hq=32 hk=8 sq=1 sk=4096 d=128" "fwd bf16 b=1 hq=32 hk=8 sq=1 sk=131072 d=128" | cut -c1-128 | tee -a "$out/bench.log"
fi
exit $status
