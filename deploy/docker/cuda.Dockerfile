# docker build -f deploy/docker/cuda.Dockerfile -t baton:cuda .
# docker run --gpus all --ipc host --network host -v /models:/models:ro baton:cuda serve /models/NAME --runtime local
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# Triton compiles a launcher for each kernel with gcc and Python's headers. `baton serve` starts redis-server.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv redis-server \
        tini \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/baton \
    && useradd --uid 10001 --create-home baton \
    && install -d -o baton -g baton -m 1777 /var/cache/baton
ENV PATH=/opt/baton/bin:$PATH

WORKDIR /src
COPY . .
# The extra that installs Ray: ray-service for deploy/kuberay/rayservice.yaml.
ARG RAY=ray
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cu130 \
        --constraint constraints/gpu.txt ".[worker,gpu,redis,$RAY]" \
    && rm -rf /src/*

WORKDIR /home/baton
USER 10001:10001
ENV BATON_CACHE_DIR=/var/cache/baton TRITON_CACHE_DIR=/var/cache/baton/triton

EXPOSE 8000
ENTRYPOINT ["tini", "--", "baton"]
CMD ["serve", "tiny", "--runtime", "local"]
