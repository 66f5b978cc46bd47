"""Print the pip arguments for the small CPU build of torch, if the machine has no GPU and PyTorch's index answers.

PyPI's torch is the CUDA build with gigabytes of libraries.
"""

import shutil
import urllib.request

INDEX = "https://download.pytorch.org/whl/cpu"

if not shutil.which("nvidia-smi"):
    try:
        urllib.request.urlopen(f"{INDEX}/torch/", timeout=5).close()
    except OSError:
        pass
    else:
        print("--extra-index-url", INDEX)
