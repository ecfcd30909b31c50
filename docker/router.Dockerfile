# The router's image. Build from the root of the repository:
#   docker build -f docker/router.Dockerfile -t stallfree/router:0.1.0 .
ARG PYTHON_VERSION=3.11

# What the router needs from outside: a layer that changes only with the requirements.
FROM python:${PYTHON_VERSION}-slim-bookworm AS dependencies
WORKDIR /build
COPY docker/requirements.py ./
COPY shared/pyproject.toml shared/
COPY services/router/pyproject.toml services/router/
RUN python requirements.py shared services/router > requirements.txt \
    && python -m venv /opt/venv
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/venv/bin/pip install -r requirements.txt

# Our own code: a layer of a few hundred kilobytes.
FROM dependencies AS code
COPY shared shared
COPY services/router services/router
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/venv/bin/pip install --no-deps --target /opt/stallfree ./shared ./services/router

FROM python:${PYTHON_VERSION}-slim-bookworm
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Stallfree router" \
      org.opencontainers.image.description="Serves the OpenAI API and sends each request to the worker where it fits best" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=code /opt/stallfree /opt/stallfree
# Nothing is written outside /tmp, so the root may be read-only, and any user id will do. LOGNAME names a user to
# libraries that ask for one that is not in /etc/passwd.
ENV PATH=/opt/stallfree/bin:/opt/venv/bin:$PATH \
    PYTHONPATH=/opt/stallfree \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    LOGNAME=stallfree
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
ENTRYPOINT ["stallfree-router"]
