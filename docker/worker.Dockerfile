# The worker's image. Build from the root of the repository, for GPUs:
#   docker build -f docker/worker.Dockerfile -t stallfree/worker:0.1.0 .
# For CPUs, with the index that holds torch's CPU build, or with a folder of wheels that is mounted into the build. A
# folder needs the version too, or pip prefers a newer CUDA build from its usual index:
#   docker build -f docker/worker.Dockerfile --build-arg TORCH_INDEX_URL=… -t stallfree/worker-cpu:0.1.0 .
#   buildah bud -f docker/worker.Dockerfile --volume /wheels:/wheels:ro --build-arg TORCH_FIND_LINKS=/wheels \
#     --build-arg TORCH_VERSION=2.13.0+cpu -t stallfree/worker-cpu:0.1.0 .
ARG PYTHON_VERSION=3.11

# What the worker needs from outside: a layer that changes only with the requirements.
FROM python:${PYTHON_VERSION}-slim-bookworm AS dependencies
ARG TORCH_INDEX_URL
ARG TORCH_FIND_LINKS
ARG TORCH_VERSION
# `gguf,gpu` brings flash-attn along, where the index has wheels of it: its source needs CUDA's compiler.
ARG EXTRAS=gguf
WORKDIR /build
COPY docker/requirements.py ./
COPY shared/pyproject.toml shared/
COPY services/worker/pyproject.toml services/worker/
RUN python requirements.py shared "services/worker[${EXTRAS}]" > requirements.txt \
    && grep '^torch' requirements.txt > torch.txt \
    && python -m venv /opt/venv
# torch first and alone: only it comes from another place in the CPU variant.
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/venv/bin/pip install -r torch.txt ${TORCH_VERSION:+"torch==${TORCH_VERSION}"} \
      ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} ${TORCH_FIND_LINKS:+--find-links "${TORCH_FIND_LINKS}"} \
    && /opt/venv/bin/pip install -r requirements.txt

# Our own code, a layer of half a megabyte: this base has the compiler for the CPU kernels.
FROM python:${PYTHON_VERSION}-bookworm AS code
WORKDIR /build
COPY shared shared
COPY services/worker services/worker
ENV STALLFREE_REQUIRE_KERNELS=1
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --target /opt/stallfree ./shared ./services/worker

FROM python:${PYTHON_VERSION}-slim-bookworm
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Stallfree worker" \
      org.opencontainers.image.description="Serves one language model with a Sarathi engine: long prompts in chunks, decodes in every step" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=code /opt/stallfree /opt/stallfree
# OpenMP for the kernels: torch brings its own, not always under this name.
COPY --from=code /usr/lib/*-linux-gnu/libgomp.so.1 /usr/local/lib/
# torch compiles small kernels for GPUs at start, which takes a C compiler, of any version.
ARG EXTRAS=gguf
# hadolint ignore=DL3008
RUN case "${EXTRAS}" in *gpu*) \
      apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* ;; \
    esac
# And a folder for models that any user id may write, for those who run the image without a volume there.
RUN ldconfig && install --directory --mode=1777 /cache
# Nothing is written outside /tmp and /cache, so the root may be read-only, and any user id will do. LOGNAME names a
# user to libraries that ask for one that is not in /etc/passwd. The last two are for NVIDIA's container runtime.
ENV PATH=/opt/stallfree/bin:/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/stallfree \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    LOGNAME=stallfree \
    HF_HOME=/cache/huggingface \
    STALLFREE_CACHE_DIR=/cache/stallfree \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["stallfree-worker"]
