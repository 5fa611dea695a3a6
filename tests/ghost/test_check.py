"""`lingua check` on CUDA and NCCL. The stub driver computes nothing, in no time."""

import re


def test_a_check_measures_every_device_and_the_links_between_them(ghost):
    command = "torchrun --nproc-per-node 2 -m lingua check gpu=h200 2>&1; test $? = 1"
    shown = ghost("bash", "-c", command)
    for rank in (0, 1):
        place = rf"rank {rank} on \S+ \(cuda:{rank}\)"
        named = rf"^error: device: {place}: NVIDIA H100 80GB HBM3, not NVIDIA H200$"
        assert re.search(named, shown, re.M)
        assert re.search(rf"^error: products, TFLOP/s: {place}: ", shown, re.M)  # above the peak
    for line in (
        "memory in use, GiB +right +at most 2 ",
        "products, TFLOP/s +OUT OF LINE .*at most 1088 ",
        "copies, GB/s +OUT OF LINE .*at most 5280 ",
        "attention, error / plain +right ",
        "all-reduce, GB/s +right +at least 270 ",
    ):
        assert re.search(f"^{line}", shown, re.M), shown
