# Two images: `coordinator` (heartbeats and barriers; without torch) and `dtckpt` (the command; PyTorch for CPUs):
#   docker build --target coordinator -t dtckpt-coordinator:0.2.0 .
#   docker build --target dtckpt -t dtckpt:0.2.0 .
# Both run as a user that is only a number, and on a read-only root; they write to no place that they are not given.
FROM python:3.11.13-slim-bookworm AS base
ENV PATH=/opt/dtckpt/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

FROM base AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY dtckpt ./dtckpt
COPY server ./server
# The constraints hold for what builds the wheel, too.
ENV PIP_CONSTRAINT=/src/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv --without-pip /opt/dtckpt

FROM build AS build-coordinator
RUN pip --python /opt/dtckpt install ./server

FROM build AS build-dtckpt
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip --python /opt/dtckpt install --extra-index-url "$TORCH_INDEX" .

FROM base AS dtckpt
COPY --from=build-dtckpt /opt/dtckpt /opt/dtckpt
USER 65532:65532
ENTRYPOINT ["dtckpt"]
CMD ["--help"]

FROM base AS coordinator
COPY --from=build-coordinator /opt/dtckpt /opt/dtckpt
USER 65532:65532
EXPOSE 50051 50052 9090
ENTRYPOINT ["dtckpt-coordinator", "serve"]
CMD ["--host", "0.0.0.0"]
