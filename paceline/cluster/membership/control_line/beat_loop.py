"""Loop of the beat thread: sends one byte per interval on each connection, and notes arrivals.

The byte is the state of the process (`activities.py`), also while a thread holds the lock.

It is written in the subset of Python that numba compiles, so that it runs without ever taking the
interpreter's lock: a thread that holds the lock doesn't silence the process. Its whole state is in
arrays that Python allocates:

    state    words                    what the loop shares with Python
    rows     a row a connection       descriptor, status, moments in ns of the monotonic clock

Python changes the status of a row by a command on the pipe only; the loop makes all changes.

    FREE -> OPEN -> ENDED -> RELEASED        the last one: the loop uses the descriptor no more

A pause of this process (a stop signal, a suspended machine) is no silence of the peers: after it,
silence counts from its end.
"""

from __future__ import annotations

from paceline.comm.transport.system_calls import (
    address,
    clock_gettime,
    errno,
    jit,
    poll,
    read,
    recv,
    send,
    write,
)

# The columns of a row, and the words of `state`.
FD, STATUS, ERROR, HEARD, SILENT_SINCE, CARRIED, ROW = range(7)
CONTROL, EVENT, INTERVAL, TOP, PASSED, NUMBER, STATE = range(7)

FREE, OPEN, ENDED, RELEASED = range(4)
ADD, REMOVE = range(2)  # commands: row * 2 + command
STOP = -1
END_OF_STREAM = -1  # an error of a row beside those of errno(3)
WORD = 8  # bytes

_IN = 0x1  # poll(2)
_BAD = 0x8 | 0x10 | 0x20
_FLAGS = 0x40 | 0x4000  # MSG_DONTWAIT, MSG_NOSIGNAL
_INTERRUPTED = 4  # errno(3)
_AGAIN = 11
_MONOTONIC = 1  # clock_gettime(2)
_SECOND = 10**9  # ns
_MILLISECOND = 10**6


@jit
def clock(moment):  # type: ignore[no-untyped-def]
    """Return the monotonic time in nanoseconds."""
    clock_gettime(_MONOTONIC, address(moment))
    return moment[0] * _SECOND + moment[1]


@jit
def take(state, rows, inbox):  # type: ignore[no-untyped-def]
    """Take commands from the pipe; return whether to continue."""
    got = read(state[CONTROL], address(inbox), inbox.shape[0] * WORD)
    for word in range(got // WORD):
        command = inbox[word]
        if command == STOP:
            return False
        row = rows[command // 2]
        if command % 2 == ADD:
            row[STATUS] = OPEN
            state[TOP] = max(state[TOP], command // 2 + 1)
        else:
            row[STATUS] = RELEASED
    return True


@jit
def receive(row, now, buffer):  # type: ignore[no-untyped-def]
    """Receive the beats that have arrived; return 0, or an error."""
    got = recv(row[FD], address(buffer), buffer.shape[0], _FLAGS)
    if got > 0:
        row[HEARD] = row[SILENT_SINCE] = now
        # Several beats may be there at once, after a pause of this process.
        row[CARRIED] = buffer[got - 1]  # the newest
        return 0
    if got == 0:
        return END_OF_STREAM
    error = errno()
    return 0 if error in (_INTERRUPTED, _AGAIN) else error


@jit
def beat(row, number, buffer):  # type: ignore[no-untyped-def]
    """Send a beat, unless the buffer is full of earlier ones; return 0, or an error."""
    buffer[0] = number
    if send(row[FD], address(buffer), 1, _FLAGS) >= 0:
        return 0
    error = errno()
    return 0 if error in (_INTERRUPTED, _AGAIN) else error


@jit
def run(state, rows, polled, inbox, buffer, moment, one):  # type: ignore[no-untyped-def]
    """Send and receive beats until the stop command."""
    interval = state[INTERVAL]
    state[PASSED] = clock(moment)
    next_beat = state[PASSED]
    while True:
        top = state[TOP]
        for r in range(top):
            # poll ignores a negative descriptor, so that rows need not move up when one ends.
            polled[r, 0] = rows[r, FD] if rows[r, STATUS] == OPEN else -1
            polled[r, 1] = _IN
        polled[top, 0] = state[CONTROL]
        polled[top, 1] = _IN
        left = max(0, next_beat - clock(moment))
        poll(address(polled), top + 1, (left + _MILLISECOND - 1) // _MILLISECOND)
        now = clock(moment)
        # This process was stopped: what its peers sent meanwhile may still be on its way.
        if now - state[PASSED] > 2 * interval:
            for r in range(top):
                rows[r, SILENT_SINCE] = now
        beats = now >= next_beat
        changes = False
        for r in range(top):
            if rows[r, STATUS] != OPEN:
                continue
            error = 0
            # The upper half of the word is what poll found, the lower half what was asked for.
            if (polled[r, 1] >> 16) & (_IN | _BAD):
                error = receive(rows[r], now, buffer)
            if beats and error == 0:
                error = beat(rows[r], state[NUMBER], buffer)
            if error != 0:
                rows[r, ERROR] = error
                rows[r, STATUS] = ENDED
                changes = True
        if beats:
            # After a pause the beats that were missed are not made up for.
            next_beat = max(next_beat + interval, now)
        state[PASSED] = now
        if (polled[top, 1] >> 16) & _IN:
            changes = True
            if not take(state, rows, inbox):
                return
        if changes:
            write(state[EVENT], address(one), WORD)
