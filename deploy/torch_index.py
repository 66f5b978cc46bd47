"""Print the pip arguments for the small CPU build of torch, if it is wanted and its index answers.

PyPI's torch is the CUDA build with gigabytes of libraries. A machine with a GPU, or one that does not reach
PyTorch's own index, gets PyPI's build.
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
