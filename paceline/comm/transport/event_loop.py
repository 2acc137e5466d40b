"""Event loop of the transport, compiled: sends queued puts, receives others, notifies of them.

It is written in the subset of Python that numba compiles, so that it runs in a thread without ever
taking the interpreter's lock. Its whole state is in arrays that Python allocates:

    links   a row a connection       the frame being sent, the frame being received; as which of
                                     all connections it ended
    puts    a row a put's piece      source, bytes left, priority; the most urgent is next
    landed  (links, notifications)   written when a put's last byte on this connection has landed
    values  (peers, notifications)   the minimum of `landed` over a peer's connections
    waits   a row a waiting thread   the peer it sleeps for, and its event
    marks   a row a put event        what was sent or arrived, and when; the newest, or none

    frame   | magic | offset | bytes | notification or -1 | value | bytes …

A put is sent in frames of limited size; between two frames a more urgent put overtakes. Only a
put's last frame carries its notification, and a stream keeps its order, so the data land before.

A peer may have several connections, in consecutive rows of `links`. Any connection with room takes
the next frame of a put. After the last frame every connection carries the notification, which
counts once all have delivered it. A small put uses one connection, always the same for a
notification, so that such puts land in order.
"""

from __future__ import annotations

from paceline.comm.transport.system_calls import (
    address,
    clock_gettime,
    errno,
    jit,
    lock,
    poll,
    read,
    recv,
    sendmsg,
    setsockopt,
    unlock,
    write,
)

# The columns of a link, a put and a wait, and the places in `state`.
FD, ALIVE, ERROR, FULL, PUT, OUT_HAVE, OUT_LEFT, OUT_AT = range(8)
IN_HAVE, IN_LEFT, IN_AT, IN_WAKE, OF_PEER, FIRST, BEHIND, ENDED_AS, LINK = range(8, 17)
STATUS, TO, PRIORITY, ORDER, AT, LEFT, OFFSET, NOTE, VALUE, REST, ONLY, TOLD, BUSY, PUTS = range(14)
ASLEEP, PEER, EVENT, WAIT = range(4)
CONTROL, MEMORY, SIZE, CHUNK, TOP, EVENTS, LOCK, GONE, SUBSCRIBED, MARKED, ENDS, STATE = range(12)
WHAT, OF, NOTIFICATION, REACHED, SECONDS, NANOSECONDS, MARK = range(7)

LEFT_HERE, ARRIVED = range(2)  # kinds of put events
FREE, WAITING, NEW, QUEUED, SENT = range(5)  # a piece's status; the event loop sets the last two
NONE = -1  # instead of a put: there is none
ANY = -1  # instead of the number of a peer's only connection for a put
WORD = 8  # bytes
HEAD_WORDS = 5
HEAD = HEAD_WORDS * WORD
MAGIC = 0x50_61_63_65
STOP = -1  # on the control pipe, instead of a put
ANY_PEER = -1  # in place of one peer's number, where a thread waits or is woken
ENDED = -1  # an error of a link beside those of errno(3), as is the next one
INVALID = -2

_IN = 0x1  # poll(2)
_OUT = 0x4
_BAD = 0x8 | 0x10 | 0x20
_FLAGS = 0x40 | 0x4000  # MSG_DONTWAIT, MSG_NOSIGNAL
_INTERRUPTED = 4  # errno(3)
_AGAIN = 11
_WAIT_SLICE_MS = 500
_SOL_SOCKET = 1  # socket(7)
_SO_RCVLOWAT = 18
# Bytes of a long frame for which the event loop wakes: woken for each packet, it would spend more
# time on system calls than on copies.
_ENOUGH = 2**17
_MONOTONIC = 1  # clock_gettime(2)


@jit
def wake(peer, events, waits, one):  # type: ignore[no-untyped-def]
    """Wake the threads that wait for a peer and, of events, those that wait for any; locked."""
    for w in range(waits.shape[0]):
        of = waits[w, PEER]
        if waits[w, ASLEEP] and (peer == ANY_PEER or of == peer or (events and of == ANY_PEER)):
            waits[w, ASLEEP] = 0
            write(waits[w, EVENT], address(one), WORD)


@jit
def mark(what, peer, note, value, state, marks):  # type: ignore[no-untyped-def]
    """Record a put event, if any are recorded; it replaces the oldest."""
    if marks.shape[0] == 0:
        return
    row = marks[state[MARKED] % marks.shape[0]]
    row[WHAT] = what
    row[OF] = peer
    row[NOTIFICATION] = note
    row[REACHED] = value
    clock_gettime(_MONOTONIC, address(row) + SECONDS * WORD)
    state[MARKED] += 1


@jit
def has_work(put, number):  # type: ignore[no-untyped-def]
    """Return whether a put's piece has a frame for its peer's connection of a number."""
    mine = put[ONLY] == ANY or put[ONLY] == number
    if put[LEFT] > 0 and mine:
        return True
    return put[REST] == NONE and not (put[TOLD] >> number) & 1


@jit
def most_urgent(link, number, state, puts):  # type: ignore[no-untyped-def]
    """Return the put that a connection sends next; -1: none waits."""
    best = -1
    for p in range(state[TOP]):
        if puts[p, STATUS] != QUEUED or puts[p, TO] != link[OF_PEER]:
            continue
        if not has_work(puts[p], number):
            continue
        sooner = puts[p, PRIORITY] - puts[best, PRIORITY] if best >= 0 else -1
        if sooner < 0 or (sooner == 0 and puts[p, ORDER] < puts[best, ORDER]):
            best = p
    return best


@jit
def begin_frame(p, link, number, head, state, puts):  # type: ignore[no-untyped-def]
    """Cut the next frame off a put; only a notification where other connections send its data."""
    put = puts[p]
    size = min(state[CHUNK], put[LEFT]) if put[ONLY] == ANY or put[ONLY] == number else 0
    head[0] = MAGIC
    head[1] = put[OFFSET]
    head[2] = size
    head[3] = -1
    head[4] = put[VALUE]
    link[PUT] = p
    link[OUT_HAVE] = 0
    link[OUT_LEFT] = size
    link[OUT_AT] = put[AT]
    put[AT] += size
    put[OFFSET] += size
    put[LEFT] -= size
    put[BUSY] += 1
    rest = put[REST]
    if rest == NONE:
        if put[LEFT] == 0 or size == 0:
            head[3] = put[NOTE]
            put[TOLD] |= 1 << number
    elif put[LEFT] == 0:
        puts[rest, OFFSET] = put[OFFSET]
        # A piece can be cut once the one before it is cut: only then is its offset known.
        puts[rest, STATUS] = QUEUED
        state[TOP] = max(state[TOP], rest + 1)


@jit
def end_frame(link, state, puts, waits, one, marks):  # type: ignore[no-untyped-def]
    """Mark a put, or a piece of it, as sent if this frame was its last."""
    p = link[PUT]
    put = puts[p]
    connections = link[BEHIND] - link[FIRST]
    link[PUT] = NONE
    put[BUSY] -= 1
    last = put[REST] == NONE
    if put[LEFT] > 0 or put[BUSY] > 0 or (last and put[TOLD] != (1 << connections) - 1):
        return
    if last:
        mark(LEFT_HERE, link[OF_PEER], put[NOTE], put[VALUE], state, marks)
    lock(state[LOCK])
    put[STATUS] = SENT
    state[GONE] += 1
    if last:
        wake(link[OF_PEER], False, waits, one)
    unlock(state[LOCK])


@jit
def send(i, state, links, puts, heads, message, waits, one, marks):  # type: ignore[no-untyped-def]
    """Send until the socket is full or nothing is left; return 0, or an error."""
    link = links[i]
    head = heads[i]
    number = i - link[FIRST]
    while True:
        if link[PUT] == NONE:
            p = most_urgent(link, number, state, puts)
            if p < 0:
                link[FULL] = 0
                return 0
            begin_frame(p, link, number, head, state, puts)
        message[8] = address(head) + link[OUT_HAVE]
        message[9] = HEAD - link[OUT_HAVE]
        message[10] = link[OUT_AT]
        message[11] = link[OUT_LEFT]
        asked = message[9] + message[11]
        sent = sendmsg(link[FD], address(message), _FLAGS)
        if sent < 0:
            error = errno()
            if error == _INTERRUPTED:
                continue
            link[FULL] = 1
            return 0 if error == _AGAIN else error
        of_head = min(sent, HEAD - link[OUT_HAVE])
        link[OUT_HAVE] += of_head
        link[OUT_AT] += sent - of_head
        link[OUT_LEFT] -= sent - of_head
        if link[OUT_HAVE] == HEAD and link[OUT_LEFT] == 0:
            end_frame(link, state, puts, waits, one, marks)
        if sent < asked:
            link[FULL] = 1
            return 0


@jit
def open_frame(link, head, state, notifications):  # type: ignore[no-untyped-def]
    """Check a complete head; return 0, or an error."""
    offset = head[1]
    size = head[2]
    note = head[3]
    if head[0] != MAGIC or size < 0 or size > state[CHUNK] or offset < 0:
        return INVALID
    if offset > state[SIZE] - size or note < -1 or note >= notifications:
        return INVALID
    link[IN_AT] = state[MEMORY] + offset
    link[IN_LEFT] = size
    return 0


@jit
def notify(i, head, state, links, landed, values, waits, one, marks):  # type: ignore[no-untyped-def]
    """Set a frame's notification, if it has one that all connections of the peer have delivered."""
    note = head[3]
    value = head[4]
    peer = links[i, OF_PEER]
    if note < 0:
        return
    landed[i, note] = value
    for other in range(links[i, FIRST], links[i, BEHIND]):
        # Frames of one put take different connections: it
        # has landed where the slowest has delivered it.
        value = min(value, landed[other, note])
    if value == values[peer, note]:
        return
    mark(ARRIVED, peer, note, value, state, marks)
    lock(state[LOCK])
    # Under the lock, with the wake: a thread that is
    # about to sleep looks at the value under it, too.
    values[peer, note] = value
    events = note < state[SUBSCRIBED]
    state[EVENTS] += events
    wake(peer, events, waits, one)
    unlock(state[LOCK])


@jit
def sleep_until(link, word):  # type: ignore[no-untyped-def]
    """Let the kernel wake the event loop for a head, or a large part of a frame."""
    enough = 1
    if link[IN_HAVE] == HEAD and link[IN_LEFT] > 0:
        enough = min(link[IN_LEFT], _ENOUGH)
    if link[IN_WAKE] != enough:
        link[IN_WAKE] = word[0] = enough
        setsockopt(link[FD], _SOL_SOCKET, _SO_RCVLOWAT, address(word), 4)


@jit
def receive(i, state, links, heads, word, landed, values, waits, one, marks):  # type: ignore[no-untyped-def]
    """Receive what has arrived; return 0, or an error."""
    link = links[i]
    head = heads[i]
    while True:
        in_head = link[IN_HAVE] < HEAD
        at = link[IN_AT]
        size = link[IN_LEFT]
        if in_head:
            at = address(head) + link[IN_HAVE]
            size = HEAD - link[IN_HAVE]
        got = recv(link[FD], at, size, _FLAGS)
        if got == 0:
            return ENDED
        if got < 0:
            error = errno()
            if error == _INTERRUPTED:
                continue
            if error != _AGAIN:
                return error
            sleep_until(link, word)
            return 0
        if in_head:
            link[IN_HAVE] += got
            if link[IN_HAVE] < HEAD:
                continue
            error = open_frame(link, head, state, values.shape[1])
            if error != 0:
                return error
        else:
            link[IN_AT] += got
            link[IN_LEFT] -= got
        if link[IN_LEFT] == 0:
            link[IN_HAVE] = 0
            notify(i, head, state, links, landed, values, waits, one, marks)
        # The kernel had no more: another call would only say so.
        if got < size:
            sleep_until(link, word)
            return 0


@jit
def take(state, puts, inbox):  # type: ignore[no-untyped-def]
    """Queue the puts whose rows Python has filled; return False at the stop command."""
    got = read(state[CONTROL], address(inbox), WORD * inbox.shape[0])
    for word in range(got // WORD):
        p = inbox[word]
        if p == STOP:
            return False
        puts[p, STATUS] = QUEUED
        state[TOP] = max(state[TOP], p + 1)
    return True


@jit
def give_up(i, error, state, links, waits, one):  # type: ignore[no-untyped-def]
    """End a connection and, unless the peer closed it, the peer's others; wake all threads."""
    lock(state[LOCK])
    # After a clean end the peer's other connections may still have what it sent.
    first, behind = (i, i + 1) if error == ENDED else (links[i, FIRST], links[i, BEHIND])
    for other in range(first, behind):
        if links[other, ALIVE]:
            links[other, ERROR] = error
            links[other, ALIVE] = 0
            state[ENDS] += 1
            links[other, ENDED_AS] = state[ENDS]
    wake(ANY_PEER, True, waits, one)
    unlock(state[LOCK])


@jit
def run(  # type: ignore[no-untyped-def]
    state, links, puts, landed, values, waits, heads, polled, message, inbox, word, one, marks
):
    """Send and receive until the stop command."""
    # A struct msghdr, whose two parts (struct iovec) begin at message[8].
    message[2] = address(message) + 8 * WORD
    message[3] = 2
    count = links.shape[0]
    while True:
        shared = False
        for i in range(count):
            polled[i, 0] = links[i, FD] if links[i, ALIVE] else -1
            # A socket with room is always ready: asked for
            # it with nothing to send, poll would not sleep.
            polled[i, 1] = _IN | _OUT if links[i, FULL] else _IN
        polled[count, 0] = state[CONTROL]
        polled[count, 1] = _IN
        poll(address(polled), count + 1, _WAIT_SLICE_MS)
        ready = (polled[count, 1] >> 16) & _IN
        if ready and not take(state, puts, inbox):
            return
        for i in range(count):
            events = polled[i, 1] >> 16
            error = 0
            if links[i, ALIVE] and events & (_IN | _BAD):
                error = receive(i, state, links, heads[0], word, landed, values, waits, one, marks)
            if links[i, ALIVE] and error == 0 and (events & _OUT or (ready and not links[i, FULL])):
                error = send(i, state, links, puts, heads[1], message, waits, one, marks)
                shared |= links[i, BEHIND] - links[i, FIRST] > 1
            if error != 0:
                give_up(i, error, state, links, waits, one)
        for i in range(count if shared else 0):  # the other connections notify of what one has sent
            if links[i, ALIVE] and not links[i, FULL]:
                error = send(i, state, links, puts, heads[1], message, waits, one, marks)
                if error != 0:
                    give_up(i, error, state, links, waits, one)
