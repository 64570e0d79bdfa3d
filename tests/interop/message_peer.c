/*
 * A peer of message streams that sends each message back. It was written from docs/message_wire.md
 * alone.
 *
 *     message_peer listen|connect HOST PORT LIMIT
 *
 * A message is sent back with its bytes if it has at most LIMIT bytes and fits into one wire
 * message. Otherwise it is announced. All sends and reads are synchronous. What arrives is handled
 * in receive(), which is called by each function that waits for the peer.
 *
 * "listening on PORT" is printed when a peer can connect; PORT 0 is any. The program ends when both
 * directions have ended and the peer has disconnected. Then it prints how many wire messages of
 * each kind there were, and "end 0". After an error, it prints that and exits with 1. The kernel
 * disconnects, and frees everything.
 */
#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#define PACKED __attribute__((packed))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* What this side allows. It has small slots, so that frames take several wire messages. */
enum {
	WINDOW = 4,
	ANNOUNCEMENTS = 2,
	SLOT_SIZE = 256,
	MAX_FRAMES = 2000,
	MAX_SIZE = 64 << 20,
	RECEIVES = WINDOW + ANNOUNCEMENTS + 3,
	INBOX = WINDOW + ANNOUNCEMENTS + 1, /* one is being sent back */
};
enum { BUFFER_SIZE = 64 * 1024 }; /* for sending; the peer may have larger slots */
enum { PIECE = 1 << 20 };	  /* the largest size of a read */
enum { MAX_READS = 4 };		  /* of the peer, at a time */
enum { PAGE = 4096, SMALL_READ = 32 };
enum { SILENCE_MS = 500 }; /* of a peer that has connected over iWARP */

enum kind { EAGER = 1, ANNOUNCE, TABLE, DONE, CREDIT, FINISH, KINDS };
enum state { READY, LISTING, FINISHED };

struct PACKED hello {
	char magic[4];
	uint8_t version;
	uint8_t features;
	uint16_t window;
	uint16_t announcements;
	uint16_t reserved;
	uint32_t slot_size;
	uint32_t frames;
	uint64_t size;
};

struct PACKED header {
	uint8_t kind;
	uint8_t reserved;
	uint16_t credits;
	uint32_t number;
};

struct PACKED entry {
	uint64_t size;
	uint64_t address;
	uint32_t key;
	uint32_t reserved;
};

struct PACKED done {
	uint64_t number;
	uint32_t result;
};

struct frame {
	uint64_t size;
	uint64_t address; /* in the memory of the peer, if it was announced */
	uint32_t key;
	char *bytes; /* in the memory of the message */
};

struct message {
	bool was_announced;
	char *bytes;	 /* of an EAGER message, in a receive buffer */
	uint64_t number; /* of an announced message */
	uint32_t count;	 /* of all frames */
	uint32_t listed; /* the number of the first frames, whose entries are known */
	uint64_t size;	 /* of these frames */
	struct frame *frames;
	char *memory;
	uint64_t capacity; /* of the memory */
	struct ibv_mr *mr;
};

static struct rdma_cm_id *id;
static struct hello theirs; /* in the byte order of this machine */
static uint64_t limit;
static bool has_accepted;
static char *slots;
static struct ibv_mr *slots_mr;
static char buffer[BUFFER_SIZE];
static char *const buffer_body = buffer + sizeof(struct header);
static struct ibv_mr *buffer_mr;
static unsigned int received_of[KINDS], sent_of[KINDS];

/* The direction to this side. */
static enum state state;
static unsigned int their_credits = WINDOW;
static unsigned int free_credits; /* that the peer does not know */
static struct message inbox[INBOX];
static uint64_t arrived, taken; /* messages of the inbox */
static uint64_t next_announced;
static unsigned int announced_in;

/* The direction to the peer. */
static unsigned int my_credits;
static uint64_t next_number;
static struct message announced[ANNOUNCEMENTS]; /* without frames: free */
static unsigned int announced_out;
static bool has_finished;

/* Exit if a call has failed. */
static void must(bool has_succeeded, const char *call)
{
	if (has_succeeded)
		return;
	fprintf(stderr, "message_peer: %s: %s\n", call, strerror(errno));
	exit(1);
}

/* Exit if the peer has broken the protocol. */
static void require(bool is_kept, const char *problem)
{
	if (is_kept)
		return;
	fprintf(stderr, "message_peer: broken protocol: %s\n", problem);
	exit(1);
}

/* --- sending, and reading the memory of the peer --- */

/* Wait until the one request of the send queue has completed. */
static void complete(bool may_fail)
{
	struct ibv_wc wc;

	must(rdma_get_send_comp(id, &wc) == 1, "rdma_get_send_comp");
	if (wc.status == IBV_WC_SUCCESS || may_fail)
		return;
	fprintf(stderr, "message_peer: a request failed: %s\n", ibv_wc_status_str(wc.status));
	exit(1);
}

/* Send a wire message, whose body is in the buffer. It returns all credits that are free. */
static void send_wire_message(enum kind kind, uint32_t number, size_t body_size)
{
	struct header *header = (struct header *)buffer;

	*header = (struct header){
		.kind = kind,
		.credits = htobe16(free_credits),
		.number = htobe32(number),
	};
	their_credits += free_credits;
	free_credits = 0;
	if (kind <= TABLE)
		my_credits--;
	sent_of[kind]++;
	must(!rdma_post_send(id, NULL, buffer, sizeof(*header) + body_size, buffer_mr, 0),
	     "rdma_post_send");
	complete(kind == FINISH); /* the peer may disconnect as soon as it has FINISH */
}

static uint64_t get_number(const char *from)
{
	uint64_t number;

	memcpy(&number, from, sizeof(number));
	return be64toh(number);
}

/* Write a number of 8 bytes. Return the end of it. */
static char *put_number(char *to, uint64_t number)
{
	number = htobe64(number);
	memcpy(to, &number, sizeof(number));
	return to + sizeof(number);
}

/* Register the memory of a message: for reading into it, and for reads of the peer. */
static void register_message(struct message *message)
{
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;

	if (id->verbs->device->transport_type == IBV_TRANSPORT_IWARP)
		access |= IBV_ACCESS_REMOTE_WRITE; /* reads need it there */
	if (!message->mr)
		message->mr = ibv_reg_mr(id->pd, message->memory, message->capacity, access);
	must(message->mr, "ibv_reg_mr");
}

/*
 * Return how many bytes of a frame are read next. Soft-iWARP sends wrong bytes for a read of up to
 * 32 bytes that crosses a page of its source.
 */
static uint32_t piece_of(uint64_t address, uint64_t size)
{
	uint64_t to_end = PAGE - address % PAGE;

	return size <= SMALL_READ ? MIN(size, to_end) : MIN(size, (uint64_t)PIECE);
}

/* Read the frames of an announced message, in pieces. */
static void read_frames(struct message *message)
{
	struct frame *frame = message->frames;
	uint64_t offset;
	uint32_t size;

	register_message(message);
	for (; frame < message->frames + message->count; frame++) {
		for (offset = 0; offset < frame->size; offset += size) {
			size = piece_of(frame->address + offset, frame->size - offset);
			must(!rdma_post_read(id, NULL, frame->bytes + offset, size, message->mr, 0,
					     frame->address + offset, frame->key),
			     "rdma_post_read");
			complete(false);
		}
	}
}

/* --- receiving --- */

static void post_receive(char *slot)
{
	must(!rdma_post_recv(id, slot, slot, SLOT_SIZE, slots_mr), "rdma_post_recv");
}

static struct message *add_message(uint32_t count)
{
	struct message *message = &inbox[arrived++ % INBOX];

	require(count <= MAX_FRAMES, "too many frames");
	*message = (struct message){ .count = count };
	message->frames = calloc(count + 1, sizeof(*message->frames));
	must(message->frames, "calloc");
	return message;
}

static void add_frame(struct message *message, uint64_t size, uint64_t address, uint32_t key)
{
	require(size <= MAX_SIZE - message->size, "the message is too large");
	message->size += size;
	message->frames[message->listed++] = (struct frame){ size, address, key, NULL };
}

static void handle_eager(uint32_t count, char *body, uint32_t size)
{
	struct message *message;
	char *at = body;

	require(state == READY, "EAGER in another state");
	require(size / sizeof(uint64_t) >= count, "EAGER without all sizes");
	message = add_message(count);
	message->bytes = body + count * sizeof(uint64_t);
	for (; at < message->bytes; at += sizeof(uint64_t))
		add_frame(message, get_number(at), 0, 0);
	require(message->bytes + message->size == body + size, "EAGER of another size");
}

static void handle_entries(const char *body, uint32_t size)
{
	struct message *message = &inbox[(arrived - 1) % INBOX];
	const struct entry *entry = (const struct entry *)body;
	uint32_t count = size / sizeof(*entry);

	require(count && size % sizeof(*entry) == 0, "entries that are not whole");
	require(count <= message->count - message->listed, "too many entries");
	for (; count; count--, entry++)
		add_frame(message, be64toh(entry->size), be64toh(entry->address),
			  be32toh(entry->key));
	state = message->listed < message->count ? LISTING : READY;
}

static void handle_announce(uint32_t count, const char *body, uint32_t size)
{
	struct message *message;
	uint64_t number;

	require(state == READY, "ANNOUNCE in another state");
	require(size >= sizeof(number), "ANNOUNCE without a number");
	number = get_number(body);
	require(number == next_announced++, "ANNOUNCE of another number");
	require(announced_in++ < MIN(ANNOUNCEMENTS, theirs.announcements), "too many ANNOUNCE");
	message = add_message(count);
	message->was_announced = true;
	message->number = number;
	handle_entries(body + sizeof(number), size - sizeof(number));
}

static void free_message(struct message *message)
{
	if (message->mr)
		must(!ibv_dereg_mr(message->mr), "ibv_dereg_mr");
	free(message->memory);
	free(message->frames);
	message->frames = NULL;
}

static void handle_done(const char *body, uint32_t size)
{
	const struct done *done = (const struct done *)body;
	struct message *message = announced;

	require(size == sizeof(*done), "DONE of another size");
	require(be32toh(done->result) <= 1, "DONE with another result");
	while (!message->frames || message->number != be64toh(done->number))
		require(++message < announced + ANNOUNCEMENTS, "DONE of another message");
	require(message->listed == message->count, "DONE of a message that is not listed");
	free_message(message);
	announced_out--;
}

static void handle_wire_message(char *slot, uint32_t length)
{
	struct header *header = (struct header *)slot;
	char *body = slot + sizeof(*header);
	uint32_t size = length - sizeof(*header);
	uint32_t number = be32toh(header->number);

	require(length >= sizeof(*header), "a message without a header");
	require(header->kind >= EAGER && header->kind < KINDS, "an unknown kind");
	received_of[header->kind]++;
	my_credits += be16toh(header->credits);
	require(my_credits <= theirs.window, "too many credits");
	if (header->kind <= TABLE)
		require(their_credits-- > 0, "a message without a credit");
	else
		require(!number, "a number in DONE, CREDIT or FINISH");
	switch (header->kind) {
	case EAGER:
		handle_eager(number, body, size);
		return; /* take_message() posts the buffer */
	case ANNOUNCE:
		handle_announce(number, body, size);
		free_credits++;
		break;
	case TABLE:
		require(state == LISTING, "TABLE in another state");
		require(size == (uint64_t)number * sizeof(struct entry), "TABLE of another size");
		handle_entries(body, size);
		free_credits++;
		break;
	case DONE:
		handle_done(body, size);
		break;
	case CREDIT:
		require(!size, "CREDIT with a body");
		break;
	case FINISH:
		require(state == READY && !size, "FINISH in another state or with a body");
		state = FINISHED;
		break;
	}
	post_receive(slot);
}

/*
 * Soft-iWARP can leave the first bytes of a peer where they are until more arrive
 * (docs/transports.md). The answer to a read of no bytes makes it look at them.
 */
static void read_nothing(void)
{
	must(!rdma_post_readv(id, NULL, NULL, 0, 0, 0, 0), "rdma_post_readv");
	complete(false);
}

/* Wait for a completion, or for the end of the connection. Returns true if it has ended. */
static bool wait_for_event(void)
{
	static bool has_waited;
	bool is_iwarp = id->verbs->device->transport_type == IBV_TRANSPORT_IWARP;
	struct pollfd fds[] = { { .fd = id->recv_cq_channel->fd, .events = POLLIN },
				{ .fd = id->channel->fd, .events = POLLIN } };
	struct ibv_cq *cq;
	void *context;

	if (!poll(fds, 2, is_iwarp && has_accepted && !has_waited ? SILENCE_MS : -1))
		read_nothing();
	has_waited = true;
	if (fds[0].revents) {
		must(!ibv_get_cq_event(id->recv_cq_channel, &cq, &context), "ibv_get_cq_event");
		ibv_ack_cq_events(cq, 1);
		must(!ibv_req_notify_cq(cq, 0), "ibv_req_notify_cq");
	}
	return !fds[0].revents && fds[1].revents;
}

/*
 * Wait for a wire message, and handle it. Return credits before, if the peer may wait for them.
 * Returns false if the peer has disconnected after both directions have ended.
 */
static bool receive(void)
{
	bool has_ended = false;
	struct ibv_wc wc;

	if (state != FINISHED && free_credits >= (WINDOW + 1) / 2)
		send_wire_message(CREDIT, 0, 0);
	for (;;) {
		if (!ibv_poll_cq(id->recv_cq, 1, &wc)) {
			if (has_ended)
				break;
			has_ended = wait_for_event();
		} else if (wc.status == IBV_WC_SUCCESS) {
			handle_wire_message((char *)(uintptr_t)wc.wr_id, wc.byte_len);
			return true;
		} else {
			require(wc.status == IBV_WC_WR_FLUSH_ERR, ibv_wc_status_str(wc.status));
		}
	}
	require(has_finished && state == FINISHED && !announced_out, "the connection ended early");
	return false;
}

/* --- messages --- */

/*
 * Allocate the memory of a message. No small frame crosses a page there: the peer may be one that
 * does not divide small reads.
 */
static void allocate(struct message *message)
{
	struct frame *frame, *end = message->frames + message->count;
	uint64_t offset = 0;

	message->capacity = (message->size / SMALL_READ + message->count + 1) * SMALL_READ;
	message->memory = aligned_alloc(SMALL_READ, message->capacity);
	must(message->memory, "aligned_alloc");
	for (frame = message->frames; frame < end; frame++) {
		frame->bytes = message->memory + offset;
		offset += (frame->size + SMALL_READ - 1) / SMALL_READ * SMALL_READ;
	}
}

/* Wait for the next message and its bytes. Return NULL after the last one. */
static struct message *take_message(void)
{
	struct message *message = &inbox[taken % INBOX];
	struct done *done = (struct done *)buffer_body;
	struct frame *frame;
	char *slot;

	while (taken == arrived ? state != FINISHED : message->listed < message->count)
		receive();
	if (taken++ == arrived)
		return NULL;
	allocate(message);
	if (message->was_announced) {
		read_frames(message);
		*done = (struct done){ .number = htobe64(message->number) };
		send_wire_message(DONE, 0, sizeof(*done));
		announced_in--;
	} else {
		slot = slots + (message->bytes - 1 - slots) / SLOT_SIZE * SLOT_SIZE;
		for (frame = message->frames; frame < message->frames + message->count; frame++) {
			memcpy(frame->bytes, message->bytes, frame->size);
			message->bytes += frame->size;
		}
		post_receive(slot);
		free_credits++;
	}
	return message;
}

static void await_credit(void)
{
	while (!my_credits)
		receive();
}

static void send_eager(struct message *message)
{
	char *at = buffer_body;
	uint32_t number;

	await_credit();
	for (number = 0; number < message->count; number++)
		at = put_number(at, message->frames[number].size);
	for (number = 0; number < message->count; number++) {
		memcpy(at, message->frames[number].bytes, message->frames[number].size);
		at += message->frames[number].size;
	}
	send_wire_message(EAGER, message->count, at - buffer_body);
	free_message(message);
}

/* Send ANNOUNCE or TABLE with the entries of the next frames, as many as fit. */
static void list_frames(struct message *message, enum kind kind)
{
	char *end = buffer + MIN(theirs.slot_size, (uint32_t)BUFFER_SIZE);
	char *at = buffer_body;
	uint32_t first = message->listed;
	struct entry *entry;

	await_credit();
	if (kind == ANNOUNCE)
		at = put_number(at, message->number);
	for (entry = (void *)at; message->listed < message->count && (char *)(entry + 1) <= end;
	     entry++) {
		struct frame *frame = &message->frames[message->listed++];

		*entry = (struct entry){ .size = htobe64(frame->size),
					 .address = htobe64((uintptr_t)frame->bytes),
					 .key = htobe32(message->mr->rkey) };
	}
	send_wire_message(kind, kind == ANNOUNCE ? message->count : message->listed - first,
			  (char *)entry - buffer_body);
}

static void announce(struct message *message)
{
	struct message *copy = announced;

	while (announced_out == MIN(ANNOUNCEMENTS, theirs.announcements))
		receive();
	while (copy->frames)
		copy++;
	register_message(message);
	message->number = next_number++;
	message->listed = 0;
	*copy = *message;
	announced_out++;
	list_frames(copy, ANNOUNCE);
	while (copy->listed < copy->count)
		list_frames(copy, TABLE);
}

static void send_back(struct message *message)
{
	uint64_t size = sizeof(struct header) + message->count * sizeof(uint64_t) + message->size;

	require(message->count <= theirs.frames && message->size <= theirs.size,
		"a message that the peer does not take back");
	if (message->size <= limit && size <= MIN(theirs.slot_size, (uint32_t)BUFFER_SIZE))
		send_eager(message);
	else
		announce(message);
}

/* --- connecting --- */

static void take_hello(const struct rdma_conn_param *param)
{
	require(param->private_data_len >= sizeof(theirs), "no Hello");
	memcpy(&theirs, param->private_data, sizeof(theirs));
	require(!memcmp(theirs.magic, "aiMS", 4) && theirs.version == 1, "another Hello");
	theirs.window = be16toh(theirs.window);
	theirs.announcements = be16toh(theirs.announcements);
	theirs.slot_size = be32toh(theirs.slot_size);
	theirs.frames = be32toh(theirs.frames);
	theirs.size = be64toh(theirs.size);
	require(theirs.window && theirs.announcements && theirs.slot_size >= 40 && theirs.frames,
		"a Hello with a number that is too small");
	my_credits = theirs.window;
}

static void post_receives(void)
{
	int number;

	slots = calloc(RECEIVES, SLOT_SIZE);
	must(slots, "calloc");
	slots_mr = rdma_reg_msgs(id, slots, RECEIVES * SLOT_SIZE);
	buffer_mr = rdma_reg_msgs(id, buffer, sizeof(buffer));
	must(slots_mr && buffer_mr, "rdma_reg_msgs");
	must(!ibv_req_notify_cq(id->recv_cq, 0), "ibv_req_notify_cq");
	for (number = 0; number < RECEIVES; number++)
		post_receive(slots + number * SLOT_SIZE);
}

/* Accept one connection. The private data of the user is sent back, too. */
static void accept_peer(struct rdma_cm_id *listener, struct rdma_conn_param *param)
{
	struct rdma_conn_param *request;
	char private_data[256];

	must(!rdma_listen(listener, 1), "rdma_listen");
	printf("listening on %d\n", ntohs(rdma_get_src_port(listener)));
	fflush(stdout);
	must(!rdma_get_request(listener, &id), "rdma_get_request");
	request = &id->event->param.conn;
	take_hello(request);
	post_receives();
	memcpy(private_data, request->private_data, request->private_data_len);
	memcpy(private_data, param->private_data, sizeof(struct hello));
	param->private_data = private_data;
	param->private_data_len = request->private_data_len;
	param->responder_resources = MIN(MAX_READS, request->responder_resources);
	param->initiator_depth = MIN(MAX_READS, request->initiator_depth);
	must(!rdma_accept(id, param), "rdma_accept");
	has_accepted = true;
}

static void print_counts(const char *what, const unsigned int *of)
{
	printf("%s EAGER %u ANNOUNCE %u TABLE %u DONE %u CREDIT %u FINISH %u\n", what, of[EAGER],
	       of[ANNOUNCE], of[TABLE], of[DONE], of[CREDIT], of[FINISH]);
}

int main(int argc, char **argv)
{
	struct PACKED {
		struct hello hello;
		char of_user[12];
	} private_data = {
		.hello = { .magic = "aiMS",
			   .version = 1,
			   .window = htobe16(WINDOW),
			   .announcements = htobe16(ANNOUNCEMENTS),
			   .slot_size = htobe32(SLOT_SIZE),
			   .frames = htobe32(MAX_FRAMES),
			   .size = htobe64(MAX_SIZE) },
		.of_user = "message_peer",
	};
	struct rdma_conn_param param = {
		.private_data = &private_data,
		.private_data_len = sizeof(private_data),
		.responder_resources = MAX_READS,
		.initiator_depth = 1,
		.retry_count = 6,
		.rnr_retry_count = 7,
	};
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 1,
			 .max_recv_wr = RECEIVES,
			 .max_send_sge = 1,
			 .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};
	bool listens = argc == 5 && !strcmp(argv[1], "listen");
	struct rdma_addrinfo hints = {
		.ai_flags = listens ? RAI_PASSIVE : 0,
		.ai_port_space = RDMA_PS_TCP,
	};
	struct message *message;
	struct rdma_addrinfo *info;
	struct rdma_cm_id *made;

	must(argc == 5, "usage: message_peer listen|connect HOST PORT LIMIT");
	limit = strtoull(argv[4], NULL, 10);
	must(!rdma_getaddrinfo(argv[2], argv[3], &hints, &info), "rdma_getaddrinfo");
	must(!rdma_create_ep(&made, info, NULL, &attr), "rdma_create_ep");
	if (listens) {
		accept_peer(made, &param);
	} else {
		id = made;
		post_receives();
		must(!rdma_connect(id, &param), "rdma_connect");
		take_hello(&id->event->param.conn);
	}

	while ((message = take_message()))
		send_back(message);
	has_finished = true;
	send_wire_message(FINISH, 0, 0);
	while (receive())
		;
	print_counts("received", received_of);
	print_counts("sent", sent_of);
	printf("end 0\n");
	return 0;
}
