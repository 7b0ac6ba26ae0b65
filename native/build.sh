set -e
cd "$(dirname "$0")"
O=${1:-/tmp/native_build}; mkdir -p $O
C="g++ -std=c++17 -O3 -fPIC -Wall -Wextra -fno-math-errno -ffp-contract=off -Wno-maybe-uninitialized -fvisibility=hidden $EXTRA"
for f in matrix threads model api; do $C -c $f.cpp -o $O/$f.o & done
$C -c kernels_portable.cpp -o $O/k0.o &
$C -mavx2 -mfma -mf16c -c kernels_avx2.cpp -o $O/k1.o &
$C -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -c kernels_avx512.cpp -o $O/k2.o &
$C -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c -c kernels_avx512vnni.cpp -o $O/k3.o &
wait
g++ -shared $EXTRA -o $O/libdeepenough.so $O/*.o -lpthread
