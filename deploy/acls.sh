#!/usr/bin/env bash
# Who may do what on a Kafka cluster with an authorizer: an edit changes what a model says, so nobody but the editor
# writes the topics that make one live. Adding a rule twice changes nothing.
#
#   BOOTSTRAP=kafka:9093 COMMAND_CONFIG=admin.properties deploy/acls.sh
#
# A principal is the user of SASL, or what the broker makes of a client certificate (`ssl.principal.mapping.rules`).
# Workers ask at their start for the rights below (pipeline/kafka/permissions.py), and name those that they lack.
#
# A branch of a history (`gracestream replay --to`) writes every topic of another prefix: that is for a super user.
#
# Rules only say what is allowed, so the cluster must reject the rest: `authorizer.class.name` is set, and
# `allow.everyone.if.no.acl.found` is false, as it is by default. `--list` instead shows what is in force.
set -euo pipefail

KAFKA_ACLS=${KAFKA_ACLS:-kafka-acls.sh}      # from Kafka's bin folder
BOOTSTRAP=${BOOTSTRAP:-localhost:9092}
COMMAND_CONFIG=${COMMAND_CONFIG:-}           # properties of a client that may alter ACLs
PREFIX=${GRACESTREAM_TOPIC_PREFIX:-}

EDITOR_PRINCIPAL=${EDITOR_PRINCIPAL:-User:gracestream-editor}
REPLICA_PRINCIPAL=${REPLICA_PRINCIPAL:-User:gracestream-replica}
USER_PRINCIPAL=${USER_PRINCIPAL:-User:gracestream-user}                   # asks
CORRECTOR_PRINCIPAL=${CORRECTOR_PRINCIPAL:-$USER_PRINCIPAL}               # flags a wrong answer
OPERATOR_PRINCIPAL=${OPERATOR_PRINCIPAL:-User:gracestream-operator}       # reads all; creates topics, takes snapshots
RESENDER_PRINCIPAL=${RESENDER_PRINCIPAL:-}                                # sends dead letters again; empty: nobody
REPLY_TOPICS=${REPLY_TOPICS:-}               # without the prefix; those that the header `reply_to` of a request may name

EDITOR_GROUP=${EDITOR_GROUP:-${PREFIX}editor}
INFERENCE_GROUP=${INFERENCE_GROUP:-${PREFIX}inference}
TRANSACTIONAL_ID=${TRANSACTIONAL_ID:-${PREFIX}editor}

kafka_acls() {
  "$KAFKA_ACLS" --bootstrap-server "$BOOTSTRAP" ${COMMAND_CONFIG:+--command-config "$COMMAND_CONFIG"} "$@"
}

# allow PRINCIPAL "OPERATIONS" TOPIC...
allow() {
  local principal=$1 operation topic arguments=()
  for operation in $2; do arguments+=(--operation "$operation"); done
  shift 2
  for topic in "$@"; do arguments+=(--topic "$PREFIX$topic"); done
  kafka_acls --add --allow-principal "$principal" "${arguments[@]}"
}

# allow_group PRINCIPAL GROUP [literal|prefixed]
allow_group() {
  kafka_acls --add --allow-principal "$1" --operation Read --group "$2" --resource-pattern-type "${3:-literal}"
}

if [[ ${1:-} == --list ]]; then
  kafka_acls --list
  exit
fi

# Every worker looks at start whether all topics are there and kept as they must be.
for principal in "$EDITOR_PRINCIPAL" "$REPLICA_PRINCIPAL"; do
  allow "$principal" "Describe DescribeConfigs" \
    requests predictions feedback edits deltas snapshots requests.dlq feedback.dlq
done

# The editor: the only writer of deltas and edits. It reads requests for the traffic that radii avoid, and outcomes and
# dead letters for the feedback record that comes after the last one that was done.
allow "$EDITOR_PRINCIPAL" Write deltas edits snapshots feedback.dlq
allow "$EDITOR_PRINCIPAL" Read feedback deltas edits snapshots requests feedback.dlq
allow_group "$EDITOR_PRINCIPAL" "$EDITOR_GROUP"
kafka_acls --add --allow-principal "$EDITOR_PRINCIPAL" --operation Write --operation Describe \
  --transactional-id "$TRANSACTIONAL_ID"

# The replicas: they follow the deltas without a group, and share the requests in one.
allow "$REPLICA_PRINCIPAL" Read requests deltas snapshots
allow "$REPLICA_PRINCIPAL" Write predictions requests.dlq
allow_group "$REPLICA_PRINCIPAL" "$INFERENCE_GROUP"
if [[ -n $REPLY_TOPICS ]]; then
  read -ra topics <<<"$REPLY_TOPICS"
  allow "$REPLICA_PRINCIPAL" "Write Describe" "${topics[@]}"
  allow "$USER_PRINCIPAL" Read "${topics[@]}"
fi

# Those who ask, and those who correct. Their own groups begin with `user-`.
allow "$USER_PRINCIPAL" Write requests
allow "$USER_PRINCIPAL" Read predictions edits
allow_group "$USER_PRINCIPAL" "${PREFIX}user-" prefixed
allow "$CORRECTOR_PRINCIPAL" Write feedback
allow "$CORRECTOR_PRINCIPAL" Read edits
allow_group "$CORRECTOR_PRINCIPAL" "${PREFIX}user-" prefixed

# Those who run it: `gracestream topics`, `replay`, `inspect`, `snapshot`, and a look into the dead letters. They write
# where a snapshot lies, and no other record.
allow "$OPERATOR_PRINCIPAL" "Read Create DescribeConfigs AlterConfigs" \
  requests predictions feedback edits deltas snapshots requests.dlq feedback.dlq
allow "$OPERATOR_PRINCIPAL" Write snapshots

# Whoever sends a dead letter again asks or corrects in the name of its first sender.
if [[ -n $RESENDER_PRINCIPAL ]]; then
  allow "$RESENDER_PRINCIPAL" Read requests.dlq feedback.dlq
  allow "$RESENDER_PRINCIPAL" Write requests feedback
fi
