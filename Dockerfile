# The package on an image that has PyTorch, g++ and the headers of CUDA and NCCL: `docker build -t deepcompile .`
# --build-arg BASE=... takes another PyTorch (2.11 to 2.15) or CUDA; with LDC_BUILD=cpu any image with PyTorch and g++ does.
ARG BASE=pytorch/pytorch:2.11.0-cuda13.0-cudnn9-devel
FROM ${BASE}

ARG LDC_BUILD=cuda
ARG EXTRAS=cli,hf,report
ARG MAX_JOBS=4
# Images of Debian and Ubuntu mark their Python as the system's; a container has no other use for it.
ENV PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1

COPY . /opt/lightning_deepcompile
# The system's own setuptools may be older, and has no list of files by which pip could remove it.
RUN pip install --ignore-installed "setuptools>=77" wheel pybind11 ninja \
    && LDC_BUILD=${LDC_BUILD} MAX_JOBS=${MAX_JOBS} \
       pip install --no-build-isolation "/opt/lightning_deepcompile[${EXTRAS}]"

# Elsewhere than in the checkout, whose package has no compiled runtime and would come first.
WORKDIR /workspace
COPY examples examples
RUN python -m lightning_deepcompile
