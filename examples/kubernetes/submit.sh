#!/bin/sh
# sh submit.sh https://ADDRESS:6443 registry.example.com/train:1 [further options of spark-submit]
# Submits train.py in cluster mode and waits for its end. First: kubectl apply -f rbac.yaml
set -eu
server=$1 image=$2
shift 2
exec spark-submit --master "k8s://$server" --deploy-mode cluster --name train \
  --conf spark.kubernetes.container.image="$image" \
  --conf spark.kubernetes.authenticate.driver.serviceAccountName=spark \
  --conf spark.executor.instances=2 \
  --conf spark.executor.cores=1 \
  --conf spark.executor.memory=1g \
  --conf spark.executor.memoryOverhead=2g \
  "$@" local:///opt/train/train.py
