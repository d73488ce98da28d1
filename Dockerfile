# train_nsa with both engines: for GPUs of compute capability 8.0 and later, and for the CPU where there is none.
#     docker build -t train_nsa .
#     docker run --rm --user "$(id -u)" -v "$PWD:/work" train_nsa      # GPUs: --gpus all --shm-size 1g
# It is for processors like the one that builds it; with `--build-arg MARCH=` it runs on any.
# No docker has built this yet: its lines were run by hand in a fresh Ubuntu 24.04 without CUDA, and user 1000 trained.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build
WORKDIR /src
COPY Makefile CHANGELOG.md *.cu *.cuh *.h ./
COPY lib lib
ARG MARCH=native
RUN apt-get update && apt-get install -y --no-install-recommends make
RUN make deps train_nsa

FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 openmpi-bin && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/train_nsa /usr/local/bin/
WORKDIR /work
RUN chown 1000:1000 .
USER 1000:1000
ENTRYPOINT ["train_nsa"]
