from setuptools import find_packages, setup

_HF = ["safetensors"]
_TEST = ["pytest", "hypothesis", "expecttest", "numpy", *_HF]
_KERNELS = ["triton; platform_system == 'Linux'"]  # Their tests run in its interpreter; CUDA builds of torch bring it.
_DEMO = ["tqdm", "matplotlib", "numpy"]
_VIZ = ["matplotlib"]

setup(
    name="torch_ragged",
    version="0.1.0",
    description="Ragged sharding for PyTorch: RaggedShard as a DTensor placement, and fully_shard on it",
    license="BSD-3-Clause",
    packages=find_packages(include=["torch_ragged", "torch_ragged.*"]),
    package_data={"torch_ragged": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.11"],
    extras_require={
        "demo": _DEMO,
        "test": [*_TEST, *_DEMO, *_KERNELS],
        "docs": _VIZ,
        "hf": _HF,
        "viz": _VIZ,
        "dev": [*_TEST, *_DEMO, *_KERNELS, "ruff", "mypy"],
    },
)
