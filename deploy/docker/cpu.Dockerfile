# docker build -f deploy/docker/cpu.Dockerfile -t baton:cpu .
FROM python:3.11-slim-bookworm

# gcc compiles the CPU kernels on first use. `baton serve` starts redis-server for its routers. tini forwards signals and
# reaps orphans.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev redis-server tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home baton \
    && install -d -o baton -g baton -m 1777 /var/cache/baton

WORKDIR /src
COPY . .
# The extra that installs Ray: ray-service for deploy/kuberay/rayservice.yaml.
ARG RAY=ray
# PyPI's torch for Linux includes CUDA; this index has the build for CPUs.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        --constraint constraints/cpu.txt ".[worker,redis,$RAY]" \
    && rm -rf /src/*

WORKDIR /home/baton
USER 10001:10001
ENV BATON_CACHE_DIR=/var/cache/baton
# Compiles the kernels into the image and checks that the model answers.
RUN ["baton", "generate", "tiny", "copy(sun moon star)=", "--temperature", "0", "--kv-cache-memory", "64MiB"]

EXPOSE 8000
ENTRYPOINT ["tini", "--", "baton"]
CMD ["serve", "tiny", "--runtime", "local"]
