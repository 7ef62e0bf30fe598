# An image with torch_ragged and its examples: docker build -t torch_ragged . && docker run --shm-size 1g torch_ragged
# With CUDA: --build-arg TORCH_INDEX=https://pypi.org/simple, and docker run --gpus all.
FROM python:3.11-slim
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/torch_ragged
COPY pyproject.toml setup.py README.md LICENSE ./
COPY torch_ragged torch_ragged
COPY examples examples
RUN pip install --no-cache-dir torch==${TORCH} --index-url ${TORCH_INDEX}
RUN pip install --no-cache-dir ".[demo]"
RUN cd / && python -c "import torch_ragged; torch_ragged.registration_report()"
ENV OMP_NUM_THREADS=1
CMD ["torchrun", "--standalone", "--nproc-per-node", "2", "examples/quickstart.py"]
