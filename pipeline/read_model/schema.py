"""The tables of the read model.

Everything in them comes from Kafka's topics. So a file of another version is rebuilt, not converted.
"""

VERSION = 1
"""Version of the tables. Raise it with every change of `TABLES`, or of what a record becomes."""

TABLES = """
CREATE TABLE source (version INTEGER NOT NULL, cluster TEXT NOT NULL, prefix TEXT NOT NULL);

-- The next offset of each partition. It changes in the transaction that adds the records before it.
CREATE TABLE positions (
    topic TEXT NOT NULL, partition INTEGER NOT NULL, next_offset INTEGER NOT NULL, PRIMARY KEY (topic, partition)
);

-- A request that was sent more than once has the inputs of the last record.
CREATE TABLE requests (
    request_id TEXT PRIMARY KEY, timestamp INTEGER NOT NULL, inputs TEXT NOT NULL, text TEXT NOT NULL
);

CREATE TABLE predictions (
    id INTEGER PRIMARY KEY, partition INTEGER NOT NULL, offset INTEGER NOT NULL, timestamp INTEGER NOT NULL,
    request_id TEXT NOT NULL, answer TEXT NOT NULL, is_label INTEGER NOT NULL, score REAL, error TEXT NOT NULL,
    entry_id TEXT, near_entry_id TEXT, near_reason TEXT NOT NULL, near_detail TEXT NOT NULL, near_target TEXT NOT NULL,
    distance REAL, radius REAL, seq INTEGER NOT NULL, term INTEGER NOT NULL, replica TEXT NOT NULL,
    latency_ms REAL NOT NULL, UNIQUE (partition, offset)
);
CREATE INDEX predictions_by_time ON predictions (timestamp, id);
CREATE INDEX predictions_by_request ON predictions (request_id);
CREATE INDEX predictions_by_entry ON predictions (entry_id, timestamp, id) WHERE entry_id IS NOT NULL;
CREATE INDEX predictions_by_near_entry ON predictions (near_entry_id, timestamp, id) WHERE near_entry_id IS NOT NULL;
CREATE INDEX predictions_by_replica ON predictions (replica, timestamp, id);

-- The row id is that of the prediction. Trigrams find parts of words, and text without spaces between words.
CREATE VIRTUAL TABLE prediction_text USING fts5 (request, answer, tokenize = 'trigram');

CREATE TABLE feedback (
    offset INTEGER PRIMARY KEY, timestamp INTEGER NOT NULL, feedback_id TEXT NOT NULL, kind TEXT NOT NULL, author TEXT,
    inputs TEXT, text TEXT, target TEXT, rephrases TEXT NOT NULL, except_from TEXT, undo TEXT, undo_author TEXT,
    request_id TEXT, note TEXT, signed INTEGER NOT NULL
);
CREATE INDEX feedback_by_id ON feedback (feedback_id);
CREATE INDEX feedback_by_request ON feedback (request_id) WHERE request_id IS NOT NULL;

CREATE TABLE outcomes (
    feedback_offset INTEGER PRIMARY KEY, timestamp INTEGER NOT NULL, feedback_id TEXT NOT NULL, status TEXT NOT NULL,
    author TEXT, entry_id TEXT, seq INTEGER, steps INTEGER, seconds REAL, reason TEXT
);
CREATE INDEX outcomes_by_id ON outcomes (feedback_id);

CREATE TABLE deltas (
    seq INTEGER PRIMARY KEY, term INTEGER NOT NULL, op TEXT NOT NULL, timestamp INTEGER NOT NULL,
    feedback_id TEXT, feedback_offset INTEGER, author TEXT, is_signed INTEGER NOT NULL, undoes TEXT NOT NULL
);
CREATE INDEX deltas_by_feedback ON deltas (feedback_id) WHERE feedback_id IS NOT NULL;
CREATE INDEX deltas_by_author ON deltas (author) WHERE author IS NOT NULL;

CREATE TABLE entry_changes (
    entry_id TEXT NOT NULL, seq INTEGER NOT NULL, change TEXT NOT NULL, PRIMARY KEY (entry_id, seq)
) WITHOUT ROWID;
CREATE INDEX entry_changes_by_seq ON entry_changes (seq);

CREATE TABLE entries (
    entry_id TEXT PRIMARY KEY, wording TEXT NOT NULL, radius REAL NOT NULL, created_seq INTEGER NOT NULL,
    removed_seq INTEGER
);

CREATE TABLE unreadable (
    topic TEXT NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL, timestamp INTEGER NOT NULL,
    reason TEXT NOT NULL, PRIMARY KEY (topic, partition, offset)
) WITHOUT ROWID;

CREATE TABLE exceptions (feedback_id TEXT PRIMARY KEY, entry_ids TEXT NOT NULL);
"""
