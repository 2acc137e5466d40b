# Paceline on CPUs, without root. Checked by hadolint, not built or run.
#
#     docker build --tag paceline .
#     docker run --rm --volume "$PWD:/work" --user "$(id -u):$(id -g)" paceline db info train-lmdb
#
# pip's own index has torch's CUDA build, of several gigabytes, which runs on CPUs as well. For the
# build without CUDA, give the index that README.md names under "CPU or CUDA":
#
#     docker build --tag paceline --build-arg TORCH_INDEX=URL .
FROM python:3.11-slim

ARG TORCH_INDEX=""

WORKDIR /opt/paceline
COPY pyproject.toml constraints.txt README.md LICENSE ./
# In a layer of its own: it is the largest, and changes with constraints.txt only.
RUN grep '^torch==' constraints.txt > torch.txt && \
    pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} --requirement torch.txt
COPY paceline paceline
RUN pip install --no-cache-dir --constraint constraints.txt .

# What is compiled at the first start is cached below HOME, which each user may write.
ENV HOME=/home/trainer USER=trainer
RUN useradd --uid 1000 --create-home --home-dir "$HOME" "$USER" && chmod 1777 "$HOME"
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["paceline"]
