#!/usr/bin/env bash
# Makes in DIR a virtual environment with the CUDA build of torch and the packages of
# requirements.txt, and the library that takes the place of the CUDA driver. Run again it installs
# only what is missing, and builds the library anew.
#
#     tests/ghost/setup.sh DIR
#
# PYTHON names the interpreter (python3); PIP_FIND_LINKS may name folders of wheels.
set -euo pipefail

torch=2.13.0 cuda=13.0 # the release of CUDA that this torch is built with, for its headers

say() { printf 'setup.sh: %s\n' "$*" >&2; }
fail() { say "$@"; exit 1; }

(($# == 1)) || fail "usage: setup.sh DIR"
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
requirements=$here/../../requirements.txt
[[ $(uname -sm) == "Linux x86_64" ]] || fail "needs Linux on x86_64, but this is $(uname -sm)"
mkdir -p -- "$1/lib"
dir=$(cd -- "$1" && pwd -P)
venv=$dir/venv

if ! command -v g++ >/dev/null; then
    say "installing g++"
    { apt-get install -y g++ || { apt-get update && apt-get install -y g++; }; } >"$dir/apt.log" 2>&1 ||
        fail "apt-get install g++ failed (see $dir/apt.log): install it and start again"
fi

# ---- the packages. Three equal signs: with two, pip prefers a 2.13.0+cpu if it finds one.
wanted=$(grep -vE '^[[:space:]]*(#|$|torch[^a-z_-])' "$requirements"
    printf '%s\n' "torch===$torch" "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-cccl==$cuda.*")
if [[ ! -r $venv/made-from || $(<"$venv/made-from") != "$wanted" ]]; then
    say "installing torch $torch with CUDA into $venv (2.5 GB to download; log: $dir/pip.log)"
    "${PYTHON:-python3}" -I -m venv "$venv" || fail "making a venv failed (Debian: apt-get install python3-venv)"
    printf '%s\n' "$wanted" >"$dir/requirements.txt"
    "$venv/bin/python" -I -m pip install --disable-pip-version-check -r "$dir/requirements.txt" >"$dir/pip.log" 2>&1 ||
        { tail -n 20 "$dir/pip.log" >&2; fail "pip failed (above)"; }
    printf '%s\n' "$wanted" >"$venv/made-from" # last: the environment is complete
fi
site=$("$venv/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
include=$site/nvidia/cu${cuda%.*}/include
for file in "$site/torch/lib/libtorch_cuda.so" "$include/crt/host_defines.h" "$include/nv/target"; do
    [[ -e $file ]] || fail "$file is missing: this is not the build with CUDA; remove $venv and start again"
done

# ---- the library: ghost.cpp, and a function that does nothing for each other that torch calls
build=$(mktemp -d -- "$dir/build.XXXX")
trap 'rm -rf -- "$build"' EXIT
g++ -std=c++17 -O1 -fPIC -Wall -Wextra -Wno-unused-parameter -isystem "$include" -isystem "$site/nvidia/nccl/include" \
    -c "$here/ghost.cpp" -o "$build/ghost.o" || fail "ghost.cpp does not compile (above)"
{
    nm -D --undefined-only "$site"/torch/lib/lib*.so | grep -oE '(cuda|cu|cublas|nccl|__cuda(Push|Pop|Launch|Get))[A-Z]\w*'
    grep -aoE 'nvml[A-Z]\w+' "$site/torch/lib/libc10_cuda.so"
} | sort -u >"$build/asked"
nm --defined-only "$build/ghost.o" | awk '{ print $3 }' | sort -u >"$build/given"
{
    echo 'extern "C" { void ghost_count_product();'
    comm -23 "$build/asked" "$build/given" |
        sed -E 's/^cublas.*([Gg]em[mv]|Matmul$).*/int &(...) { ghost_count_product(); return 0; }/; t; s/.*/int &(...) { return 0; }/'
    echo '}'
} >"$build/others.cpp"
g++ -fPIC -shared -Wl,-soname,libcuda.so.1 "$build/ghost.o" "$build/others.cpp" -o "$build/library" -ldl ||
    fail "the library does not link (above)"
mv -- "$build/library" "$dir/lib/libcuda.so.1" # in one step: running programs keep theirs
ln -sfn libcuda.so.1 "$dir/lib/libnvidia-ml.so.1"

"$here/run" "$dir" python -I -c '
import torch
x = torch.ones(64, 64, device="cuda"); (x @ x).sum().item()
print(f"setup.sh: torch {torch.__version__} runs on {torch.cuda.device_count()} x {torch.cuda.get_device_name()} on the stub driver")
' >&2 || fail "torch does not run on it (above)"
