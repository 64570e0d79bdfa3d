/* Work requests on registered memory, posted alone or in chains. */
#ifndef AIORDMA_WORK_REQUESTS_H
#define AIORDMA_WORK_REQUESTS_H

#include <arpa/inet.h>
#include <stdint.h>

#include <infiniband/verbs.h>

/* A request on one piece of memory, in a chain. */
struct aiordma_link {
	struct ibv_send_wr wr;
	struct ibv_sge sge;
};

/* Requests that are linked by `next`. One ibv_post_send() posts them all. */
struct aiordma_chain {
	int count;
	int capacity;
	struct aiordma_link *links;
};

/* Set the immediate data: `imm` in host byte order. A negative `imm` means none. */
static inline void aiordma_fill_imm(struct ibv_send_wr *wr, int64_t imm)
{
	if (imm >= 0)
		wr->imm_data = htonl((uint32_t)imm);
}

/*
 * Make a send, write or read of the memory in `segments`. For a send with invalidate, `rkey` is the
 * key that the peer's device invalidates.
 */
static inline struct ibv_send_wr aiordma_request(uint64_t wr_id, int opcode,
						 struct ibv_sge *segments, int count,
						 uint32_t flags, int64_t imm, uint64_t remote_addr,
						 uint32_t rkey)
{
	struct ibv_send_wr wr = {
		.wr_id = wr_id,
		.sg_list = segments,
		.num_sge = count,
		.opcode = opcode,
		.send_flags = flags,
	};

	if (opcode == IBV_WR_SEND_WITH_INV) {
		wr.invalidate_rkey = rkey;
	} else {
		wr.wr.rdma.remote_addr = remote_addr;
		wr.wr.rdma.rkey = rkey;
	}
	aiordma_fill_imm(&wr, imm);
	return wr;
}

/* Append a request on one piece of memory. The caller makes sure that there is room. */
static inline void aiordma_append(struct aiordma_chain *chain, uint64_t wr_id, int opcode,
				  struct ibv_sge segment, uint32_t flags, int64_t imm,
				  uint64_t remote_addr, uint32_t rkey)
{
	struct aiordma_link *link = &chain->links[chain->count];

	link->sge = segment;
	link->wr = aiordma_request(wr_id, opcode, &link->sge, 1, flags, imm, remote_addr, rkey);
	if (chain->count++)
		link[-1].wr.next = &link->wr;
}

#endif
