// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Simulated PCI functions for the lab's guest: SIMULATED, no hardware is behind them.
 *
 * Each bus that a function is given for must be the empty one behind a PCI Express port. Its configuration space is
 * answered from memory here, and the bus is scanned: the kernel then has real devices, IOMMU groups and drivers. The
 * functions have no memory, no interrupt and no DMA. A write to the configuration space changes only what a kernel
 * reads back.
 */
#include <linux/bitops.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/slab.h>

#define MOST 48
#define MOST_VFS 4
#define SPACE 4096
#define EXPRESS 0x40
#define POWER 0x80
#define SRIOV 0x100
#define ACS 0x180
#define ACS_WANTED (PCI_ACS_SV | PCI_ACS_RR | PCI_ACS_CR | PCI_ACS_UF | PCI_ACS_DT)
/* The first virtual function's number; the following ones come one after the other. */
#define FIRST_VF 4

static char *functions[MOST];
static int given;
module_param_array(functions, charp, &given, 0444);
MODULE_PARM_DESC(functions, "each BUS.FUNCTION:VENDOR:DEVICE:CLASS:ACS:VFS, hexadecimal");

struct function {
	unsigned int bus, devfn, vfs;
	u8 *space;
};

static struct function made[MOST * (MOST_VFS + 1)];
static int number;

static struct {
	struct pci_bus *bus;
	struct pci_ops *before;
} taken[MOST];
static int taken_number;

static void put(u8 *space, int where, int size, u32 value)
{
	while (size--) {
		space[where++] = value;
		value >>= 8;
	}
}

static struct function *find(struct pci_bus *bus, unsigned int devfn)
{
	int i;

	for (i = 0; i < number; i++)
		if (made[i].bus == bus->number && made[i].devfn == devfn)
			return &made[i];
	return NULL;
}

static int answer(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	struct function *function = find(bus, devfn);
	int i;

	*value = ~0;
	if (!function)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (where < 0 || where + size > SPACE)
		return PCIBIOS_BAD_REGISTER_NUMBER;
	for (*value = 0, i = size - 1; i >= 0; i--)
		*value = *value << 8 | function->space[where + i];
	return PCIBIOS_SUCCESSFUL;
}

/* What of a register can be written; everything else keeps its value. */
static const struct {
	int where, size;
	u32 bits;
} writable[] = {
	{ PCI_COMMAND, 2, PCI_COMMAND_IO | PCI_COMMAND_MEMORY | PCI_COMMAND_MASTER | PCI_COMMAND_INTX_DISABLE },
	{ PCI_INTERRUPT_LINE, 1, 0xff },
	{ EXPRESS + PCI_EXP_DEVCTL, 2, 0x7fff },
	{ POWER + PCI_PM_CTRL, 2, PCI_PM_CTRL_STATE_MASK },
	{ SRIOV + PCI_SRIOV_CTRL, 2, 0xffff },
	{ SRIOV + PCI_SRIOV_NUM_VF, 2, 0xffff },
	{ SRIOV + PCI_SRIOV_SYS_PGSIZE, 4, ~0 },
	{ ACS + PCI_ACS_CTRL, 2, ACS_WANTED },
};

static int take(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	struct function *function = find(bus, devfn);
	int i;

	if (!function)
		return PCIBIOS_DEVICE_NOT_FOUND;
	for (i = 0; i < ARRAY_SIZE(writable); i++) {
		int capability = writable[i].where & ~0x3f;

		if (writable[i].where != where || writable[i].size != size)
			continue;
		/* A capability that this function hasn't. */
		if (where >= SRIOV && !function->space[capability])
			continue;
		put(function->space, where, size, value & writable[i].bits);
	}
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops simulated = { .read = answer, .write = take };

static int make(unsigned int bus, unsigned int devfn, u32 vendor, u32 device, u32 class, bool acs, unsigned int vfs)
{
	u8 *space = kzalloc(SPACE, GFP_KERNEL);

	if (!space)
		return -ENOMEM;
	made[number++] = (struct function){ .bus = bus, .devfn = devfn, .vfs = vfs, .space = space };
	put(space, PCI_VENDOR_ID, 2, vendor);
	put(space, PCI_DEVICE_ID, 2, device);
	put(space, PCI_CLASS_REVISION, 4, class << 8 | 0xa1);
	put(space, PCI_SUBSYSTEM_VENDOR_ID, 2, vendor);
	put(space, PCI_SUBSYSTEM_ID, 2, 0x1482);
	put(space, PCI_STATUS, 2, PCI_STATUS_CAP_LIST);
	/* The firmware of a machine turns its display on. */
	if (class == PCI_CLASS_DISPLAY_VGA << 8)
		put(space, PCI_COMMAND, 2, PCI_COMMAND_IO | PCI_COMMAND_MEMORY);
	put(space, PCI_CAPABILITY_LIST, 1, EXPRESS);
	put(space, EXPRESS, 2, PCI_CAP_ID_EXP | POWER << 8);
	put(space, EXPRESS + PCI_EXP_FLAGS, 2, 2 | PCI_EXP_TYPE_ENDPOINT << 4);
	put(space, EXPRESS + PCI_EXP_DEVCAP, 4, PCI_EXP_DEVCAP_FLR | PCI_EXP_DEVCAP_RBER);
	put(space, EXPRESS + PCI_EXP_LNKCAP, 4, PCI_EXP_LNKCAP_SLS_16_0GB | 16 << 4);
	/* The speeds up to that one. */
	put(space, EXPRESS + PCI_EXP_LNKCAP2, 4, PCI_EXP_LNKCAP2_SLS_2_5GB | PCI_EXP_LNKCAP2_SLS_5_0GB |
	    PCI_EXP_LNKCAP2_SLS_8_0GB | PCI_EXP_LNKCAP2_SLS_16_0GB);
	put(space, EXPRESS + PCI_EXP_LNKSTA, 2, PCI_EXP_LNKSTA_CLS_16_0GB | 16 << 4);
	put(space, POWER, 2, PCI_CAP_ID_PM);
	put(space, POWER + PCI_PM_PMC, 2, 3);
	/* The list of extended capabilities begins at 0x100; an entry with neither number nor version is a gap. */
	if (vfs) {
		put(space, SRIOV, 4, PCI_EXT_CAP_ID_SRIOV | 1 << 16 | (acs ? ACS << 20 : 0));
		put(space, SRIOV + PCI_SRIOV_INITIAL_VF, 2, vfs);
		put(space, SRIOV + PCI_SRIOV_TOTAL_VF, 2, vfs);
		put(space, SRIOV + PCI_SRIOV_VF_OFFSET, 2, FIRST_VF);
		put(space, SRIOV + PCI_SRIOV_VF_STRIDE, 2, 1);
		put(space, SRIOV + PCI_SRIOV_VF_DID, 2, device);
		put(space, SRIOV + PCI_SRIOV_SUP_PGSIZE, 4, 0x553);
		put(space, SRIOV + PCI_SRIOV_SYS_PGSIZE, 4, 1);
	} else if (acs) {
		put(space, SRIOV, 4, PCI_EXT_CAP_ID_VNDR | 1 << 16 | ACS << 20);
	}
	if (acs) {
		put(space, ACS, 4, PCI_EXT_CAP_ID_ACS | 1 << 16);
		put(space, ACS + PCI_ACS_CAP, 2, ACS_WANTED);
	}
	return 0;
}

static int parse(const char *text)
{
	unsigned int bus, function, vendor, device, class, acs, vfs, i;
	int error;

	if (sscanf(text, "%x.%x:%x:%x:%x:%x:%x", &bus, &function, &vendor, &device, &class, &acs, &vfs) != 7 ||
	    bus > 255 || function > 7 || vfs > MOST_VFS) {
		pr_err("fakecards: %s isn't BUS.FUNCTION:VENDOR:DEVICE:CLASS:ACS:VFS\n", text);
		return -EINVAL;
	}
	error = make(bus, PCI_DEVFN(0, function), vendor, device, class, acs, vfs);
	for (i = 0; i < vfs && !error; i++) {
		error = make(bus, PCI_DEVFN(0, FIRST_VF) + i, vendor, device, class, acs, 0);
		/* No scan finds a virtual function. */
		if (!error)
			put(made[number - 1].space, PCI_VENDOR_ID, 4, ~0);
	}
	return error;
}

static int plug(unsigned int where)
{
	struct pci_bus *bus = pci_find_bus(0, where);
	int i;

	for (i = 0; i < taken_number; i++)
		if (taken[i].bus == bus)
			return 0;
	if (!bus || !list_empty(&bus->devices)) {
		pr_err("fakecards: there is no empty bus %02x\n", where);
		return -ENODEV;
	}
	taken[taken_number].bus = bus;
	taken[taken_number++].before = pci_bus_set_ops(bus, &simulated);
	pci_rescan_bus(bus);
	return 0;
}

static bool end_sriov(struct pci_bus *bus)
{
	struct pci_dev *device;

	list_for_each_entry(device, &bus->devices, bus_list)
		if (device->is_physfn && pci_num_vf(device)) {
			pci_disable_sriov(device);
			return true;
		}
	return false;
}

static void unplug_all(void)
{
	struct pci_dev *device, *next;
	int i;

	pci_lock_rescan_remove();
	for (i = 0; i < taken_number; i++) {
		while (end_sriov(taken[i].bus))
			;
		list_for_each_entry_safe_reverse(device, next, &taken[i].bus->devices, bus_list)
			pci_stop_and_remove_bus_device(device);
		pci_bus_set_ops(taken[i].bus, taken[i].before);
	}
	pci_unlock_rescan_remove();
	for (i = 0; i < number; i++)
		kfree(made[i].space);
}

static int __init begin(void)
{
	int i, j, error = 0;

	for (i = 0; i < given && !error; i++)
		error = parse(functions[i]);
	for (i = 0; i < number; i++)
		for (j = 0; j < number; j++)
			if (i != j && made[i].bus == made[j].bus)
				put(made[i].space, PCI_HEADER_TYPE, 1, 0x80);
	pci_lock_rescan_remove();
	for (i = 0; i < number && !error; i++)
		error = plug(made[i].bus);
	pci_unlock_rescan_remove();
	if (error)
		unplug_all();
	return error;
}

module_init(begin);
module_exit(unplug_all);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Simulated PCI functions of the kubegpu.share lab");
